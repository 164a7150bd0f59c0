"""Beam search finds what `transformers.generate(num_beams=...)` finds: alone, over prefill and decode apart, and after losses."""

import asyncio
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from cluster.ingress.delivery.beam_search import BeamParams, BeamSearch, Likeliest
from cluster.ingress.delivery.search_steps import Found
from cluster.ingress.telemetry.timeline import Timeline
from cluster.local import LocalCluster
from core.types import Request, SamplingParams
from tests.cluster.ingress.delivery.test_shared_prompt import running
from tests.models.checkpoints import FAMILIES, VOCAB, make
from tests.patience import PATIENCE_S

ENDS = (1, 7, 20)
LENGTH = 14
SHAPES = [
    BeamParams(1),
    BeamParams(3),
    BeamParams(4, 1.0, True),
    BeamParams(4, 2.5, "never"),
    BeamParams(3, 0.0, False),
    BeamParams(5, -1.0, "never"),
    BeamParams(2, 0.5, True),
]


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    folder = tmp_path_factory.mktemp("model")
    return folder, make(folder, FAMILIES["llama"](random.Random(3), 0), seed=1)


def prompt_of(seed: int, length: int = 23) -> tuple[int, ...]:
    rng = random.Random(seed)
    return tuple(rng.randrange(2, VOCAB) for _ in range(length))


def truth(
    model: Any, prompt: Sequence[int], params: BeamParams, ends: Sequence[int]
) -> tuple[list[list[int]], list[float]]:
    """The beams of `generate`, best first, and their scores."""
    out = model.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
        max_new_tokens=LENGTH,
        do_sample=False,
        num_beams=params.width,
        num_return_sequences=params.width,
        length_penalty=params.length_penalty,
        early_stopping=params.early_stopping,
        eos_token_id=list(ends),
        pad_token_id=VOCAB - 1,
        return_dict_in_generate=True,
        output_scores=True,
    )
    beams = [sequence[len(prompt) :].tolist() for sequence in out.sequences]
    cut = [beam[: next((i + 1 for i, t in enumerate(beam) if t in ends), len(beam))] for beam in beams]
    return cut, out.sequences_scores.tolist() if params.width > 1 else []


def score(found: Sequence[float], params: BeamParams) -> float:
    return sum(found) / len(found) ** params.length_penalty


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("params", SHAPES, ids=str)
def test_the_search_finds_what_transformers_finds(
    reference: tuple[Path, Any], params: BeamParams, seed: int
) -> None:
    _, model = reference
    prompt, ends = prompt_of(seed), random.Random(seed).sample(range(VOCAB - 1), 1 + seed % 3)
    search = BeamSearch(params, frozenset(ends), LENGTH)
    while not search.is_over:
        rows = torch.tensor([[*prompt, *beam.tokens] for beam in search.running])
        with torch.no_grad():
            values, ids = model(rows).logits[:, -1].log_softmax(-1).topk(min(VOCAB, search.num_candidates))
        tops: list[Likeliest] = [
            list(zip(i, v, strict=True)) for i, v in zip(ids.tolist(), values.tolist(), strict=True)
        ]
        search.advance(tops)
    best, scores = truth(model, prompt, params, ends)
    assert [list(beam.tokens) for beam in search.best(params.width)] == best
    if scores:
        found = [score(beam.logprobs, params) for beam in search.best(params.width)]
        assert found == pytest.approx(scores, abs=1e-4, rel=1e-6)


class World:
    def __init__(self, cluster: LocalCluster, timelines: list[Timeline]) -> None:
        self.cluster, self.timelines, self.frontend = cluster, timelines, cluster.frontend

    async def search(self, prompt: tuple[int, ...], params: BeamParams) -> Found:
        frontend = self.frontend
        sampling = SamplingParams(max_tokens=LENGTH, stop_token_ids=ENDS, num_logprobs=2)
        request = Request(
            id=frontend.new_request_id(), prompt=prompt, sampling=sampling, reply_to=frontend.address
        )
        return await frontend.search(request, params, params.width)

    async def check(self, model: Any, prompt: tuple[int, ...], params: BeamParams) -> Found:
        found = await self.search(prompt, params)
        best, scores = truth(model, prompt, params, ENDS)
        assert [[token.token for token in beam] for beam in found.beams] == best
        if scores:
            said = [score([token.logprob or 0.0 for token in beam], params) for beam in found.beams]
            assert said == pytest.approx(scores, abs=1e-4)
        return found


@pytest.mark.parametrize("cache", [True, False])
async def test_it_finds_the_same_over_prefill_and_decode_apart(
    reference: tuple[Path, Any], cache: bool
) -> None:
    folder, model = reference
    timelines: list[Timeline] = []
    async with running(folder, timelines, **{"engine.prefix_cache": cache}) as cluster:
        world = World(cluster, timelines)
        for seed, params in enumerate(SHAPES[: None if cache else 2]):
            found = await world.check(model, prompt_of(seed, 40), params)
            assert found.num_sampled >= len(found.beams[0])
        assert [len(one.attempts) for one in timelines] == [1] * len(timelines)
        # Only for the first prompt is the place certain: later ones go where the measured rates say.
        assert timelines[0].attempts[0].handed_over is not None
        # The last token comes before the instances have given back what they sent and received.
        async with asyncio.timeout(PATIENCE_S):
            while any(instance.num_used_blocks for instance in cluster.instances):
                await asyncio.sleep(0.01)
        for instance in cluster.instances:
            instance.check_integrity()


async def test_a_lost_decode_instance_costs_nothing_but_time(reference: tuple[Path, Any]) -> None:
    folder, model = reference
    timelines: list[Timeline] = []
    async with running(folder, timelines, decode_instances=2) as cluster:
        world = World(cluster, timelines)
        prompt, params = prompt_of(4), BeamParams(4, 2.0, "never")
        decodes = cluster.instances[:2]

        async def lose_who_has_it() -> str:
            while True:
                for instance in decodes:
                    if instance.num_jobs > 1:  # more than the one that brings the prompt
                        await instance.close()
                        return instance.address
                await asyncio.sleep(0)

        losing = asyncio.create_task(lose_who_has_it())
        await world.check(model, prompt, params)
        async with asyncio.timeout(PATIENCE_S):
            lost = await losing
        assert lost in {attempt.lost for attempt in timelines[0].attempts}
