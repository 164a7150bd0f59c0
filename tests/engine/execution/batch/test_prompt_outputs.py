"""What is read of a prompt's own tokens is what transformers says, whatever the pool, the chunks and the cache."""

import random
from pathlib import Path
from typing import Any, Literal

import pytest
import torch

from core.plan import StepPlan
from core.types import PromptScore, Request, SamplingParams, TokenOut
from models.registry import load_model
from tests.engine.execution.test_runner import Instance, prompts
from tests.models.checkpoints import CPU, FAMILIES, make

NUM_TOP = 3


def answers(instance: Instance, requests: list[Request]) -> list[TokenOut]:
    for request in requests:
        instance.scheduler.sequences.add(request)
    out: list[TokenOut] = []
    flight: list[StepPlan] = []
    while True:
        while len(flight) < instance.depth and (plan := instance.scheduler.plan(0.0)):
            flight.append(plan)
        if not flight:
            return out
        out += instance.scheduler.commit(flight[0], instance.step(flight.pop(0)), 0.0)


def expected(reference: torch.nn.Module, prompt: tuple[int, ...]) -> torch.Tensor:
    with torch.inference_mode():
        return torch.log_softmax(reference(torch.tensor([prompt])).logits[0].float(), -1)


def agree(scores: tuple[PromptScore, ...], want: torch.Tensor, prompt: tuple[int, ...]) -> None:
    assert len(scores) == len(prompt) - 1
    for score, row, token in zip(scores, want, prompt[1:], strict=False):
        assert score.logprob == pytest.approx(float(row[token]), abs=2e-4)
        assert score.rank == 1 + int((row > row[token]).sum())
        top = row.topk(NUM_TOP)
        assert [token for token, _ in score.top] == top.indices.tolist()
        assert [value for _, value in score.top] == pytest.approx(top.values.tolist(), abs=2e-4)


@pytest.mark.parametrize("family", ["llama", "gemma2", "deepseek_v3"])
def test_they_are_those_of_transformers(family: str, tmp_path: Path) -> None:
    rng = random.Random(family)
    reference = make(tmp_path, FAMILIES[family](rng, 0), seed=1)
    model: Any = load_model(tmp_path, "float32", CPU)
    sampling = SamplingParams(temperature=0.0, max_tokens=3, num_prompt_logprobs=NUM_TOP)
    requests = [
        Request(id=str(i), prompt=text, sampling=sampling, reply_to="f")
        for i, text in enumerate(prompts(rng))
    ]
    want = {request.id: expected(reference, request.prompt) for request in requests}
    for num_blocks in (200, 17):
        for budget in (1, 5, 64):
            instance = Instance(model, num_blocks, max_batch_tokens=budget)
            for _ in ("nothing cached", "all of it"):
                found = answers(instance, requests)
                for token in found:
                    if token.index:
                        assert not token.prompt_scores
                    else:
                        request = requests[int(token.request_id)]
                        agree(token.prompt_scores, want[request.id], request.prompt)
                assert sum(token.index == 0 for token in found) == len(requests)


def test_other_requests_are_left_alone(tmp_path: Path) -> None:
    make(tmp_path, FAMILIES["llama"](random.Random(3), 0), seed=1)
    model: Any = load_model(tmp_path, "float32", CPU)
    plain = SamplingParams(temperature=0.0, max_tokens=3)
    scored = SamplingParams(temperature=0.0, max_tokens=3, num_prompt_logprobs=0)
    text = (5, 9, 7, 8, 3, 2, 4, 4)
    requests = [
        Request(id=str(i), prompt=text, sampling=sampling, reply_to="f")
        for i, sampling in enumerate((plain, scored))
    ]
    instance = Instance(model, max_batch_tokens=64)
    answers(instance, requests[:1])
    asked, hits = instance.scheduler.load().prefix_tokens
    answers(instance, requests[1:])
    assert instance.scheduler.load().prefix_tokens == (asked + len(text), hits), (
        "its prefix is computed again"
    )
    answers(instance, requests[:1])
    assert instance.scheduler.load().prefix_tokens[1] > hits


@pytest.mark.parametrize("kind", ["last", "mean", "cls"])
def test_pooled_states_are_those_of_transformers(
    kind: Literal["last", "mean", "cls"], tmp_path: Path
) -> None:
    rng = random.Random(kind)
    reference = make(tmp_path, FAMILIES["llama"](rng, 0), seed=1)
    model: Any = load_model(tmp_path, "float32", CPU)
    sampling = SamplingParams(temperature=0.0, max_tokens=1, pooling=kind)
    requests = [
        Request(id=str(i), prompt=text, sampling=sampling, reply_to="f")
        for i, text in enumerate(prompts(rng))
    ]
    for num_blocks in (200, 17):
        for budget in (1, 5, 64):
            instance = Instance(model, num_blocks, max_batch_tokens=budget)
            for _ in ("nothing cached", "all of it"):
                for token in answers(instance, requests):
                    with torch.inference_mode():
                        states = reference.model(torch.tensor([requests[int(token.request_id)].prompt]))[0][0]
                    want = {"last": states[-1], "mean": states.mean(0), "cls": states[0]}[kind]
                    got = torch.frombuffer(bytearray(token.embedding), dtype=torch.float32)
                    torch.testing.assert_close(got, want, atol=2e-5, rtol=1e-4)
            _, hits = instance.scheduler.load().prefix_tokens
            assert (hits > 0) == (kind == "last")
