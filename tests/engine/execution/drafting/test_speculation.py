"""Steps that verify draft tokens: whatever is proposed, tokens, log-probabilities and ends are those of one token at a time, bit
for bit.

Recurrent layers take several tokens in by other sums than one after the other. So where a model has any, log-probabilities are
the same but for their last digits."""

import random
from collections.abc import Sequence as SeqOf
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from core.kv import KVLayout
from core.types import Request, SamplingParams, ThinkingBudget, TokenOut
from engine.planning.sequence import Sequence
from engine.planning.speculation.drafter import Draft
from models.causal_model import CausalModel
from models.drafting.drafting_head import DraftingHead
from models.drafting.eagle import load_eagle, read_eagle
from models.drafting.mtp import load_mtp
from models.families.table import read_spec
from models.registry import LoadOptions, load_model
from tests.engine.execution.test_launching import agree
from tests.engine.execution.test_runner import Instance
from tests.models.checkpoints import CPU, FAMILIES, HYBRID, VOCAB, make
from tests.models.eagle_checkpoints import make_eagle
from tests.models.mtp_checkpoints import MTP_FAMILIES, make_right_mtp, with_mtp

pytestmark = pytest.mark.turns(3)

Said = dict[str, list[TokenOut]]
Heads = dict[str, tuple[DraftingHead, KVLayout]]
"""By source, with how its KV is laid out."""
ALL = {**FAMILIES, **HYBRID}


class Adversary:
    """Proposes what will be sampled, spoiled at a place of its choice, or anything at all."""

    def __init__(self, truth: dict[str, list[int]], rng: random.Random) -> None:
        self.truth, self.rng = truth, rng

    def draft(self, seqs: SeqOf[Sequence], most: int) -> list[Draft | None]:
        return [Draft(self.propose(seq, most), "", 1) for seq in seqs]

    def propose(self, seq: Sequence, most: int) -> tuple[int, ...]:
        output = self.truth.get(seq.request.id, [])
        right = output[seq.num_output : seq.num_output + self.rng.randint(0, most)]
        return (*right, *(self.rng.randrange(VOCAB) for _ in range(most - len(right))))

    def verified(self, seq: Sequence, proposed: int, right: int) -> None: ...

    def left(self, seq: Sequence) -> None: ...


def requests(rng: random.Random, count: int) -> list[Request]:
    """Prompts that repeat themselves, with all that a sample may depend on."""
    made: list[Request] = []
    for i in range(count):
        part = [rng.randrange(2, VOCAB) for _ in range(rng.randint(2, 6))]
        prompt = (part * 4)[: rng.randint(6, 20)]
        sampling = SamplingParams(
            temperature=rng.choice((0.0, 0.0, 0.4, 0.8, 1.2)),
            top_p=rng.choice((1.0, 0.7)),
            top_k=rng.choice((0, 5)),
            min_p=rng.choice((0.0, 0.1)),
            repetition_penalty=rng.choice((1.0, 1.0, 1.1)),
            presence_penalty=rng.choice((0.0, 0.0, 0.5)),
            frequency_penalty=rng.choice((0.0, 0.0, -0.4)),
            seed=rng.randrange(64),
            logit_bias=rng.choice(((), ((rng.randrange(VOCAB), 4.0),))),
            allowed_token_ids=rng.choice(((), (), tuple(range(3, 12)))),
            bad_words=rng.choice(((), ((rng.randrange(VOCAB),), (4, 5)))),
            num_logprobs=rng.choice((-1, 0, 3)),
            num_prompt_logprobs=rng.choice((-1, -1, 1)),
            max_tokens=rng.randint(1, 30),
            min_tokens=rng.choice((0, 8)),
            stop_token_ids=tuple(rng.sample(range(VOCAB), 2)),
            masked_until_min=(1,),
            thinking=rng.choice(
                (None, None, ThinkingBudget(max_tokens=5, begin=(), end=(VOCAB - 1,), forced=(VOCAB - 1, 7)))
            ),
        )
        made.append(Request(id=f"r{i}", prompt=tuple(prompt), sampling=sampling, reply_to="f"))
    return made


def requests_of_64_seeds(rng: random.Random) -> list[Request]:
    return [
        replace(request, sampling=replace(request.sampling, seed=seed, temperature=(0.0, 0.3, 0.7, 1.0)[seed % 4]))
        for seed, request in enumerate(requests(rng, 64))
    ]  # fmt: skip


def said(instance: Instance, asked: list[Request]) -> Said:
    instance.said.clear()
    instance.run(asked)
    return dict(instance.said)


def one_at_a_time(model: CausalModel, asked: list[Request]) -> Said:
    num_blocks = 200 + num_states(model)
    return {
        id: tokens
        for request in asked
        for id, tokens in said(Instance(model, num_blocks, depth=1), [request]).items()
    }


def num_states(model: CausalModel) -> int:
    return model.spec.kv_layout(4, "float32").state_blocks


def check(got: Said, want: Said, model: CausalModel) -> None:
    if num_states(model):
        agree(got, want, 1e-3)  # a prompt in other chunks, too
    else:
        assert got == want


def alike(folder: Path, family: str, seed: int) -> CausalModel:
    """Make a model that mostly says what the one of the same family and seed says."""
    reference = make(folder, ALL[family](random.Random(family), 0), seed=seed)
    torch.manual_seed(5)
    with torch.no_grad():
        for parameter in reference.parameters():
            parameter.add_(torch.randn_like(parameter) * parameter.std().nan_to_num() * 0.1)
    reference.save_pretrained(folder, max_shard_size="20KB" if seed % 2 else "1GB")
    return load_model(folder, "float32", CPU)


def loaded(folder: Path, family: str, seed: int) -> CausalModel:
    rng = random.Random(family)
    make(folder, ALL[family](rng, 0), seed=seed)
    return load_model(folder, "float32", CPU, options=LoadOptions(deterministic=family in FAMILIES))


def loaded_with_heads(folder: Path, family: str, seed: int) -> tuple[CausalModel, Heads]:
    """Make heads of random weights, too. `seed` is even, since a layer is added to a checkpoint of one file."""
    reference = make(folder, ALL[family](random.Random(family), 0), seed=seed)
    if family in MTP_FAMILIES:
        with_mtp(folder, reference, family)
    make_eagle(folder / "eagle", reference, reads=(0, 1, 1))
    spec = read_eagle(folder / "eagle", read_spec(folder))
    model = load_model(
        folder, "float32", CPU, options=LoadOptions(deterministic=family in FAMILIES, taps=spec.taps)
    )
    head = load_eagle(folder / "eagle", model, CPU, block_size=4)
    heads: Heads = {"eagle:stranger": (head, spec.layer.kv_layout(4, "float32"))}
    if family in MTP_FAMILIES:
        heads["mtp"] = load_mtp(folder, model, CPU), model.spec.kv_layout(4, "float32")
    return model, heads


DIFFERENT = (
    "cohere2", "deepseek_v3", "deepseek_v32", "gemma4_small", "glm4_moe", "glm4_moe_lite", "gpt_oss", "llama4", "mixtral",
    "olmo3",
)  # fmt: skip
"""Families whose layers differ in what several tokens of a sequence in one step may touch: kinds of attention, norms, experts."""
FEW = ["llama", "gemma2", *HYBRID, *(pytest.param(family, marks=pytest.mark.slow) for family in DIFFERENT)]


@pytest.mark.parametrize("family", FEW)
def test_no_source_changes_a_token(family: str, tmp_path: Path) -> None:
    """In chunks, with preemptions, with lookahead and without, with the prefix cache and without."""
    model, heads = loaded_with_heads(tmp_path, family, seed=2)
    rng, states = random.Random(family), num_states(model)
    asked = requests(rng, 5)
    want = one_at_a_time(model, asked)
    accepted = 0
    drafts = {"draft:stranger": loaded(tmp_path / "stranger", "qwen3", seed=4)}
    if not states:  # a draft model takes nothing back
        drafts |= {"draft:itself": model, "draft:alike": alike(tmp_path / "alike", family, seed=2)}
    for source in ("ngram", "adversary", *drafts, *heads):
        head, head_layout = heads.get(source, (None, None))
        truth = {id: [token.token for token in tokens] for id, tokens in want.items()}
        instance = Instance(
            model,
            num_blocks=rng.choice((200 + 5 * states, 16 + 2 * states)),
            depth=rng.choice((1, 2)),
            max_batch_tokens=rng.choice((7, 64)),
            prefix_cache=rng.random() < 0.7,
            speculate=source if source != "adversary" else "none",
            speculate_tokens=rng.choice((1, 3, 8)),
            drafter=Adversary(truth, rng) if source == "adversary" else None,
            draft=drafts.get(source),
            head=head,
            head_layout=head_layout,
        )
        for _ in ("nothing is known of outputs", "all of them are"):
            check(said(instance, asked), want, model)
        accepted += instance.scheduler.load().draft_tokens[1]
    assert accepted > 0


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", *HYBRID])
def test_sixty_four_seeds_at_any_temperature(family: str, tmp_path: Path) -> None:
    model = loaded(tmp_path, family, seed=2)
    rng = random.Random(3)
    asked = requests_of_64_seeds(rng)
    want = said(Instance(model, 1000 + 64 * num_states(model)), asked)
    truth = {id: [token.token for token in tokens] for id, tokens in want.items()}
    draft = alike(tmp_path / "alike", "llama", seed=2)
    num_blocks = 40 + 4 * num_states(model)
    for keys in (
        {"speculate": "ngram"},
        {"speculate": "draft:alike", "draft": draft},
        {"drafter": Adversary(truth, rng)},
    ):
        instance = Instance(model, num_blocks, **keys)  # type: ignore[arg-type]
        check(said(instance, asked), want, model)
        proposed, right = instance.scheduler.load().draft_tokens
        assert proposed > right > 0
        assert num_states(model) or instance.scheduler.load().num_preempted > 0


@pytest.mark.parametrize("source", ["ngram", "draft:itself", "mtp"])
def test_a_sequence_that_came_from_elsewhere_goes_on_as_it_would_have(source: str, tmp_path: Path) -> None:
    if source == "mtp":
        make_right_mtp(tmp_path)
        model = load_model(tmp_path, "float32", CPU, options=LoadOptions(deterministic=True))
    else:
        model = loaded(tmp_path, "qwen3", seed=3)
    draft = model if source == "draft:itself" else None
    head = load_mtp(tmp_path, model, CPU) if source == "mtp" else None
    asked = requests(random.Random(9), 8)
    want = one_at_a_time(model, asked)
    emitted = {request.id: tuple(token.token for token in want[request.id][:-1][:5]) for request in asked}
    again = said(
        Instance(model, speculate=source, draft=draft, head=head),
        [request.retry(emitted[request.id]) for request in asked],
    )
    for request in asked:
        rest = [token.token for token in want[request.id][len(emitted[request.id]) :]]
        assert [token.token for token in again[request.id]] == rest


def test_rejected_draft_tokens_leave_nothing_in_the_prefix_cache(tmp_path: Path) -> None:
    """A later prompt that is the wrong draft token itself must not find its KV there."""
    make(tmp_path, FAMILIES["llama"](random.Random(4), 0), seed=4)
    model = load_model(tmp_path, "float32", CPU)
    sampling = SamplingParams(temperature=0.0, max_tokens=20)
    first = Request(id="first", prompt=(5, 6, 7), sampling=sampling, reply_to="f")
    stop = one_at_a_time(model, [first])["first"][17].token
    first = replace(first, sampling=replace(sampling, stop_token_ids=(stop,)))
    want = one_at_a_time(model, [first])
    instance = Instance(model, drafter=Adversary({}, random.Random(1)), block_size=1)
    assert said(instance, [first]) == want
    output = [token.token for token in want["first"]]
    queried, hit = instance.scheduler.load().prefix_tokens
    others = [
        Request(
            id=f"{at}",
            prompt=(5, 6, 7, *output[:at], (output[at] + 1) % VOCAB, 3),
            sampling=sampling,
            reply_to="f",
        )
        for at in range(0, len(output), 2)
    ]
    others.append(Request(id="end", prompt=(5, 6, 7, *output, 3), sampling=sampling, reply_to="f"))
    assert len(output) > 4  # fmt: skip
    for other in others:
        assert said(instance, [other]) == one_at_a_time(model, [other])
    now_queried, now_hit = instance.scheduler.load().prefix_tokens
    assert now_hit > hit
    assert now_queried > queried
