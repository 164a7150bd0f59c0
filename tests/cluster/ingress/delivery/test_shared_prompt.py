"""Several sequences of one prompt, over prefill and decode apart: the answers are those of separate requests, and the prompt is
computed and handed over once."""

import asyncio
import contextlib
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cluster.ingress.delivery.frontend import Frontend
from cluster.ingress.delivery.shared_prompt import SharedPrompt
from cluster.ingress.telemetry.timeline import Timeline
from cluster.local import LocalCluster
from core.config.cluster_config import load
from core.reports import WorkCounts
from core.types import Request, SamplingParams, Slo
from tests.models.checkpoints import FAMILIES, VOCAB, make
from tests.patience import PATIENCE_S

LENGTH = 9
COUNT = 4


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    make(path, FAMILIES["llama"](random.Random(0), 0), seed=1)
    return path


class World:
    def __init__(self, cluster: LocalCluster, timelines: list[Timeline]) -> None:
        self.cluster, self.timelines = cluster, timelines
        self.frontend: Frontend = cluster.frontend

    def request(self, prompt: tuple[int, ...], seed: int, length: int = LENGTH) -> Request:
        sampling = SamplingParams(temperature=1.0, seed=seed, max_tokens=length)
        frontend = self.frontend
        return Request(
            id=frontend.new_request_id(), prompt=prompt, sampling=sampling, reply_to=frontend.address
        )

    async def answer(self, request: Request, shared: SharedPrompt | None = None) -> list[int]:
        return [token.token async for token in self.frontend.generate(request, shared)]

    async def together(self, prompt: tuple[int, ...], length: int = LENGTH) -> list[list[int]]:
        shared = SharedPrompt()
        requests = [self.request(prompt, seed, length) for seed in range(COUNT)]
        return list(await asyncio.gather(*(self.answer(request, shared) for request in requests)))

    async def apart(self, prompt: tuple[int, ...], length: int = LENGTH) -> list[list[int]]:
        return [await self.answer(self.request(prompt, seed, length)) for seed in range(COUNT)]

    @property
    def num_handed_over(self) -> int:
        return sum(attempt.handed_over is not None for one in self.timelines for attempt in one.attempts)

    async def count(self, fact: Callable[[WorkCounts], int], want: Callable[[int], bool]) -> int:
        """The sum over all instances, as soon as it is what is wanted, or after a while."""
        count = -1
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(PATIENCE_S):
                while not want(count):
                    status = await self.frontend.status()
                    count = sum(fact(one.work) for one in status.instances)
        return count


def running(folder: Path, timelines: list[Timeline], **keys: Any):
    values = {
        "model.path": str(folder),
        "engine.block_size": 4,
        "engine.num_blocks": 120,
        "engine.max_batch_tokens": 24,
        "schedule.local_threshold_tokens": 0,
    }
    return LocalCluster.running(load(None, {}, values | keys), timelines.append)


def prompt_of(length: int) -> tuple[int, ...]:
    rng = random.Random(length)
    return tuple(rng.randrange(2, VOCAB) for _ in range(length))


@pytest.mark.parametrize("cache", [True, False])
@pytest.mark.parametrize("num_prompt", [40, 42])
async def test_the_prompt_is_computed_and_handed_over_once(
    folder: Path, num_prompt: int, cache: bool
) -> None:
    timelines: list[Timeline] = []
    prompt = prompt_of(num_prompt)
    async with running(folder, timelines, **{"engine.prefix_cache": cache}) as cluster:
        world = World(cluster, timelines)
        answers = await world.together(prompt)
        # Each but the first computes the prompt's last token, from which its own first token is sampled.
        num_tokens = num_prompt + COUNT - 1 + COUNT * (LENGTH - 1)
        assert await world.count(lambda work: work.computed_tokens, num_tokens.__eq__) == num_tokens
        assert world.num_handed_over == 1
        assert len({tuple(answer) for answer in answers}) == COUNT
        assert answers == await world.apart(prompt)
        for instance in cluster.instances:
            instance.check_integrity()
            assert instance.num_used_blocks == 0


@pytest.mark.parametrize("cache", [True, False])
@pytest.mark.parametrize("num_prompt", [40, 42])
async def test_the_first_token_says_how_much_of_the_prompt_was_cached(
    folder: Path, num_prompt: int, cache: bool
) -> None:
    prompt, num_before = prompt_of(num_prompt), 0
    async with running(folder, [], **{"engine.prefix_cache": cache}) as cluster:
        world = World(cluster, [])
        for repeated in (False, True, True):
            tokens = [token async for token in world.frontend.generate(world.request(prompt, seed=1))]
            num_cached = tokens[0].num_cached
            assert (num_cached > 0) == (cache and repeated)
            assert not any(token.num_cached for token in tokens[1:])
            num_tokens = num_before + num_prompt - num_cached + LENGTH - 1
            assert await world.count(lambda work: work.computed_tokens, num_tokens.__eq__) == num_tokens
            num_before = num_tokens


async def test_answers_of_one_token_share_the_prompt_too(folder: Path) -> None:
    timelines: list[Timeline] = []
    prompt = prompt_of(30)
    async with running(folder, timelines) as cluster:
        world = World(cluster, timelines)
        answers = await world.together(prompt, length=1)
        assert world.num_handed_over == 1
        assert answers == await world.apart(prompt, length=1)


async def test_what_the_first_instance_has_no_room_for_gets_the_kv_from_there(folder: Path) -> None:
    timelines: list[Timeline] = []
    prompt = prompt_of(40)
    keys = {"decode_instances": 2, "engine.max_num_seqs": 2}
    async with running(folder, timelines, **keys) as cluster:
        world = World(cluster, timelines)
        answers = await world.together(prompt)
        routes = [one.attempts[0].route for one in timelines]
        homes = {route.decode for route in routes if route is not None}
        assert len(homes) == 2
        prefills = {route.prefill for route in routes if route is not None and route.prefill}
        assert prefills <= homes | {cluster.instances[-1].address}
        assert answers == await world.apart(prompt)


async def test_sequences_that_are_preempted_go_on_with_the_same_answers(folder: Path) -> None:
    timelines: list[Timeline] = []
    prompt = prompt_of(42)
    async with running(folder, timelines, **{"engine.num_blocks": 44}) as cluster:
        world = World(cluster, timelines)
        shared = SharedPrompt()
        requests = [world.request(prompt, seed, 30) for seed in range(COUNT)]
        streams = [world.frontend.generate(request, shared) for request in requests]
        answers = [[(await anext(stream)).token] for stream in streams]
        urgent = replace(world.request(prompt_of(100), 0, 20), slo=Slo(priority=1))
        await world.answer(urgent)
        for answer, stream in zip(answers, streams, strict=True):
            answer += [token.token async for token in stream]
        assert await world.count(lambda work: work.preempted, lambda count: count > 0) > 0
        assert answers == await world.apart(prompt, length=30)
        for instance in cluster.instances:
            instance.check_integrity()
            assert instance.num_used_blocks == 0


async def test_answers_survive_the_loss_of_the_instance_that_has_the_prompt(folder: Path) -> None:
    timelines: list[Timeline] = []
    prompt = prompt_of(41)
    async with running(folder, timelines, decode_instances=2) as cluster:
        world = World(cluster, timelines)
        want = await world.apart(prompt, length=40)
        del timelines[:]
        shared = SharedPrompt()
        requests = [world.request(prompt, seed, 40) for seed in range(COUNT)]
        streams = [world.frontend.generate(request, shared) for request in requests]
        answers = [[(await anext(stream)).token] for stream in streams]
        lost = next(one for one in cluster.instances if one.address == shared.home)
        await lost.close()
        assert shared.home == lost.address
        for answer, stream in zip(answers, streams, strict=True):
            answer += [token.token async for token in stream]
        assert answers == want
        assert shared.home == ""
        assert all(one.attempts[0].lost == lost.address for one in timelines)


async def test_where_the_first_sequence_is_cancelled_the_next_one_brings_the_kv(folder: Path) -> None:
    timelines: list[Timeline] = []
    prompt = prompt_of(41)
    async with running(folder, timelines) as cluster:
        world = World(cluster, timelines)
        shared = SharedPrompt()
        first = world.request(prompt, 0)
        cancelled = asyncio.ensure_future(anext(world.frontend.generate(first, shared)))
        others = [
            asyncio.create_task(world.answer(world.request(prompt, seed), shared)) for seed in range(1, COUNT)
        ]
        await asyncio.sleep(0)
        cancelled.cancel()
        answers = await asyncio.gather(*others)
        assert list(answers) == (await world.apart(prompt))[1:]


async def test_a_sequence_whose_sibling_has_another_prompt_is_not_misled(folder: Path) -> None:
    timelines: list[Timeline] = []
    async with running(folder, timelines) as cluster:
        world = World(cluster, timelines)
        first, second = world.request(prompt_of(30), 0, 40), world.request(prompt_of(31), 1)
        stream = world.frontend.generate(first)
        await anext(stream)
        answer = await world.answer(replace(second, sibling=first.key))
        await stream.aclose()
        assert answer == await world.answer(world.request(prompt_of(31), 1))
