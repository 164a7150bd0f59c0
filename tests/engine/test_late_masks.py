"""A mask that takes long holds up its own sequence alone: it is left out of steps until the mask is made, and says the same."""

import asyncio
import random
import time
from collections.abc import AsyncGenerator, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from itertools import takewhile
from threading import Event

import numpy as np
import pytest

from core.clock import WallClock
from core.config.cluster_config import EngineConfig
from core.kv import KVShard
from core.plan import FailedSeq, NewSeq
from core.types import Grammar, Request, SamplingParams, TokenId, TokenOut
from engine.execution.inline_group import InlineGroup
from engine.execution.pools.kv_pool import KVPool
from engine.execution.runner import Runner
from engine.execution.sampling.grammar_masks import GrammarMasks
from engine.execution.sampling.grammar_matcher import Mask, Matchers
from engine.execution.sampling.step_sampling import StepSampler
from engine.loop import Engine
from engine.planning.step_scheduler import StepScheduler
from models.causal_model import CausalModel
from models.registry import load_model
from tests.engine.fifo_policy import FifoPolicy
from tests.models.checkpoints import CPU, FAMILIES, VOCAB, make
from tests.patience import until

NUM_TOKENS, NUM_BLOCKS = 12, 200
LARGE = "slow to start" + " " * (32 << 10)
"""A grammar so large that compiling it may take long."""


class EvenTokens:
    """Allows tokens of even ids. With a `gate`, its second mask takes the processor long, and it makes its third one when the gate
    is open."""

    def __init__(self, gate: Event | None, num_output: int) -> None:
        self.mask = Mask(np.full((VOCAB + 31) // 32, 0x55555555, np.int32))
        self._gate, self._num_output = gate, num_output

    def advance(self, tokens: Sequence[TokenId]) -> None:
        assert all(token % 2 == 0 for token in tokens)
        before, self._num_output = self._num_output, self._num_output + len(tokens)
        if self._gate is not None and before < 1 <= self._num_output:
            end = time.thread_time() + 0.004
            while time.thread_time() < end:
                pass
        if self._gate is not None and before < 2 <= self._num_output:
            assert self._gate.wait(60)

    def behind(self, drafts: Sequence[TokenId]) -> list[Mask]:
        return [self.mask for _ in takewhile(lambda token: token % 2 == 0, drafts)]


class GatedMatchers(Matchers):
    """Sequences whose grammar is `slow` wait for the gate at their third mask, and with a large one at the first."""

    def __init__(self) -> None:
        self.gate = Event()

    def start(self, new: NewSeq, grammar: Grammar) -> EvenTokens:
        if grammar.text == LARGE:
            assert self.gate.wait(60)
        return EvenTokens(self.gate if grammar.text == "slow" else None, len(new.tokens) - new.num_prompt)


class Answers:
    """core.ports.EngineEvents"""

    def __init__(self) -> None:
        self.tokens: dict[str, list[int]] = {}
        self._ended: dict[str, asyncio.Event] = {}

    def on_tokens(self, tokens: list[TokenOut]) -> None:
        for token in tokens:
            self.tokens.setdefault(token.request_id, []).append(token.token)
            if token.finish is not None:
                self._event(token.request_id).set()

    async def of(self, ids: Iterable[str]) -> dict[str, list[int]]:
        for id in ids:
            await asyncio.wait_for(self._event(id).wait(), 60)
        return {id: self.tokens[id] for id in ids}

    def on_stuck(self, keys: list[str]) -> None:
        raise AssertionError(f"{keys} are stuck")

    def on_taken_back(self, paused: list[str], lost: list[str]) -> None:
        raise AssertionError(f"nothing sends {paused} and {lost} on")

    def on_failed(self, failed: Sequence[FailedSeq]) -> None:
        raise AssertionError(f"{failed} have no images")

    def on_error(self, error: BaseException) -> None:
        raise error

    def _event(self, id: str) -> asyncio.Event:
        return self._ended.setdefault(id, asyncio.Event())


class Instance:
    def __init__(self, model: CausalModel, lookahead: bool) -> None:
        config = EngineConfig(block_size=4, max_batch_tokens=16)
        shard = KVShard.whole(model.spec.kv_layout(4, "float32"))
        pool = KVPool(shard, NUM_BLOCKS, memoryview(bytearray(shard.pool_bytes(NUM_BLOCKS))))
        self.matchers = GatedMatchers()
        grammars = GrammarMasks(self.matchers)
        runner = Runner(model, pool, 4, sampler=StepSampler(model, grammars))
        self.scheduler = StepScheduler(config, NUM_BLOCKS, 128, FifoPolicy())
        group = InlineGroup(runner.step, grammars)
        self.engine = Engine(self.scheduler, group, WallClock(), lookahead=lookahead)
        self.answers = Answers()

    @asynccontextmanager
    async def running(self) -> "AsyncGenerator[Instance]":
        task = asyncio.create_task(self.engine.run(self.answers))
        try:
            yield self
            assert self.scheduler.load().num_used_blocks == 0
            self.scheduler.check_integrity()
        finally:
            self.matchers.gate.set()
            await self.engine.close()
            await task


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> CausalModel:
    folder = tmp_path_factory.mktemp("model")
    make(folder, FAMILIES["llama"](random.Random(3), 0), seed=3)
    return load_model(folder, "float32", CPU)


def request(id: str, grammar: str = "") -> Request:
    seed = sum(map(ord, id))
    prompt = tuple(random.Random(seed).randrange(2, VOCAB) for _ in range(10))
    sampling = SamplingParams(
        seed=seed,
        temperature=1.0,
        max_tokens=NUM_TOKENS,
        grammar=Grammar(text=grammar) if grammar else None,
    )
    return Request(id=id, prompt=prompt, sampling=sampling, reply_to="f")


def as_free(request: Request) -> Request:
    return replace(request, sampling=replace(request.sampling, grammar=None))


OTHERS = [request("free"), request("quick", "quick"), request("free too"), request("another", "quick")]
SLOW = [request("slow", "slow"), request("new", LARGE)]


async def unhurried(model: CausalModel) -> dict[str, list[int]]:
    """What all say where no mask is late."""
    async with Instance(model, lookahead=False).running() as instance:
        instance.matchers.gate.set()
        for each in (*OTHERS, *SLOW):
            instance.engine.add(each)
        return await instance.answers.of([each.id for each in (*OTHERS, *SLOW)])


@pytest.mark.parametrize("lookahead", [False, True])
async def test_others_go_on_while_masks_are_made_and_all_say_what_they_say_unhurried(
    model: CausalModel, lookahead: bool
) -> None:
    want = await unhurried(model)
    async with Instance(model, lookahead).running() as instance:
        for each in (*SLOW, *OTHERS):
            instance.engine.add(each)
        others = await instance.answers.of([each.id for each in OTHERS])
        assert others == {id: want[id] for id in others}
        # As far as they can go. The second mask takes the processor, which others may have meanwhile.
        await until(lambda: [len(instance.answers.tokens.get(each.id, ())) for each in SLOW] == [2, 0])
        instance.matchers.gate.set()
        slow = await instance.answers.of([each.id for each in SLOW])
        assert slow == {id: want[id] for id in slow}


@pytest.mark.parametrize("lookahead", [False, True])
async def test_where_all_wait_for_masks_whoever_comes_is_served_and_all_go_on_later(
    model: CausalModel, lookahead: bool
) -> None:
    async with Instance(model, lookahead).running() as instance:
        for each in SLOW:
            instance.engine.add(each)
        await instance.answers.of([])
        for number in range(3):  # one by one: between them everything waits
            late_comer = as_free(request(f"comes {number}"))
            instance.engine.add(late_comer)
            await instance.answers.of([late_comer.id])
        num_steps = instance.engine.work_counts().steps
        instance.matchers.gate.set()
        assert num_steps < 3 * (NUM_TOKENS + 1) + 12, "nobody is computed in vain again and again"
        await instance.answers.of([each.id for each in SLOW])


async def test_a_sequence_that_waits_for_its_mask_can_be_aborted(model: CausalModel) -> None:
    async with Instance(model, lookahead=True).running() as instance:
        for each in (*SLOW, OTHERS[0]):
            instance.engine.add(each)
        await instance.answers.of([OTHERS[0].id])
        for each in SLOW:
            instance.engine.abort(each.key)
        instance.matchers.gate.set()
        instance.engine.add(as_free(request("last")))
        await instance.answers.of(["last"])
