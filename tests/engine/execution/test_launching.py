"""Steps that are launched before the host knows the last one's tokens say what steps that wait for them say."""

import random
from pathlib import Path
from typing import Any

import pytest

from core.types import Grammar, Request, SamplingParams, ThinkingBudget, TokenOut
from models.causal_model import CausalModel
from models.registry import load_model
from tests.engine.execution.test_runner import prompts
from tests.engine.launching import Launching
from tests.engine.test_late_masks import GatedMatchers
from tests.models.checkpoints import CPU, FAMILIES, HYBRID, VOCAB, make
from tests.models.continuation import continuation

FREE: dict[str, SamplingParams] = {
    "greedy": SamplingParams(temperature=0.0, max_tokens=20),
    "sampled": SamplingParams(seed=1, temperature=0.9, top_p=0.8, max_tokens=17),
    "cut": SamplingParams(seed=2, temperature=1.3, top_k=9, min_p=0.05, max_tokens=20),
    "scored": SamplingParams(seed=3, num_logprobs=3, num_prompt_logprobs=2, max_tokens=9),
    "biased": SamplingParams(
        seed=4, logit_bias=((7, 4.0), (9, -50.0)), bad_words=((5,),), num_logprobs=0, max_tokens=14
    ),
    "stopped": SamplingParams(
        seed=5,
        min_tokens=3,
        stop_token_ids=tuple(range(VOCAB // 2)),
        masked_until_min=tuple(range(VOCAB // 2)),
    ),
    "penalties": SamplingParams(
        seed=7, repetition_penalty=1.3, frequency_penalty=0.4, num_logprobs=2, max_tokens=20
    ),
    "repeated": SamplingParams(temperature=0.0, repetition_penalty=1.7, max_tokens=20),
    "frequent": SamplingParams(temperature=0.0, presence_penalty=0.3, frequency_penalty=0.6, max_tokens=20),
    "few": SamplingParams(seed=6, allowed_token_ids=(3, 4, 5, 6), max_tokens=12),
}
"""What is asked of tokens that need not be on the host."""
BOUND: dict[str, SamplingParams] = {
    "bad words of several tokens": SamplingParams(
        temperature=0.0,
        bad_words=tuple((a, b) for a in range(VOCAB) for b in range(VOCAB // 2)),
        max_tokens=12,
    ),
    "thinking budget": SamplingParams(
        seed=8, thinking=ThinkingBudget(max_tokens=4, begin=(), end=(5, 6), forced=(5, 6)), max_tokens=12
    ),
    "grammar": SamplingParams(seed=9, grammar=Grammar(text="even"), max_tokens=12),
}
"""What is asked of tokens that must be on the host, by the reason."""


def requests(*kinds: dict[str, SamplingParams]) -> list[Request]:
    rng, asked = random.Random(5), {name: each for kind in kinds for name, each in kind.items()}
    texts = prompts(rng) * 2
    return [
        Request(id=name, prompt=text, sampling=sampling, reply_to="f")
        for (name, sampling), text in zip(asked.items(), texts, strict=False)
    ]


def agree(got: dict[str, list[TokenOut]], want: dict[str, list[TokenOut]], tolerance: float = 1e-4) -> None:
    """The same tokens, for the same reasons. Log-probabilities depend a little on what a step computes beside them."""
    for name, tokens in want.items():
        assert [(each.token, each.finish) for each in got[name]] == [
            (each.token, each.finish) for each in tokens
        ]
        for one, other in zip(got[name], tokens, strict=True):
            assert one.logprob == pytest.approx(other.logprob, abs=tolerance)
            assert [token for token, _ in one.top] == [token for token, _ in other.top]
            scores = [each.logprob for each in other.prompt_scores]
            assert [each.logprob for each in one.prompt_scores] == pytest.approx(scores, abs=tolerance)


def open_matchers() -> GatedMatchers:
    matchers = GatedMatchers()
    matchers.gate.set()
    return matchers


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> CausalModel:
    folder = tmp_path_factory.mktemp("model")
    make(folder, FAMILIES["llama"](random.Random(3), 0), seed=3)
    return load_model(folder, "float32", CPU)


async def test_greedy_is_what_transformers_says(tmp_path: Path) -> None:
    rng, length = random.Random(1), 20
    reference = make(tmp_path, FAMILIES["gemma2"](rng, 0), seed=1)
    asked = [
        Request(
            id=str(i), prompt=text, sampling=SamplingParams(temperature=0.0, max_tokens=length), reply_to="f"
        )
        for i, text in enumerate(prompts(rng))
    ]
    instance = Launching(load_model(tmp_path, "float32", CPU), 17, max_batch_tokens=9)
    said = await instance.run(asked)
    for request in asked:
        tokens = [token.token for token in said[request.id]]
        assert tokens == continuation(reference, request.prompt, tokens, length)
    assert instance.num_preempted
    assert instance.watched is not None
    assert instance.watched.num_overlapped > 10


@pytest.mark.turns(3)
@pytest.mark.parametrize(
    ("num_blocks", "config"),
    [(200, {}), (17, {"max_batch_tokens": 7}), (200, {"speculate": "ngram"})],
    ids=["whole prompts", "chunks and preemption", "drafts"],
)
async def test_each_says_what_it_says_where_every_token_is_waited_for(
    model: CausalModel, num_blocks: int, config: dict[str, Any]
) -> None:
    asked = requests(FREE, BOUND)
    want = await Launching(model, matchers=open_matchers(), launching=False, **config).run(asked)
    instance = Launching(model, num_blocks, matchers=open_matchers(), **config)
    agree(await instance.run(asked), want)
    assert num_blocks == 200 or instance.num_preempted


async def test_a_step_waits_for_what_its_sequences_need_on_the_host_and_for_nothing_else(
    model: CausalModel,
) -> None:
    instance = Launching(model)
    await instance.run(requests(FREE))
    assert instance.watched is not None
    assert not instance.watched.awaited
    assert instance.watched.num_overlapped > 5
    for name, sampling in BOUND.items():
        instance = Launching(model, matchers=open_matchers())
        await instance.run(requests({name: sampling}))
        assert instance.watched is not None
        assert set(instance.watched.awaited.values()) == {name}


async def test_recurrent_states_go_from_step_to_step_on_the_device(tmp_path: Path) -> None:
    make(tmp_path, HYBRID["qwen3_next"](random.Random(4), 0), seed=2)
    hybrid, asked = load_model(tmp_path, "float32", CPU), requests(FREE)[:3]
    want = await Launching(hybrid, 1000, launching=False).run(asked)
    instance = Launching(hybrid, 250)
    agree(await instance.run(asked), want)
    assert instance.watched is not None
    assert instance.watched.num_overlapped > 10
    drafting = Launching(hybrid, 250, speculate="ngram")
    agree(await drafting.run(asked), want)
    assert drafting.work.accepted_tokens > 0
