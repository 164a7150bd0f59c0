"""A step that does not end is given up. One that is slow is not, nor one of a process that stood still itself."""

import asyncio
import gc
import random
import threading
import weakref
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from math import inf
from types import SimpleNamespace
from typing import Any

from core.clock import WallClock
from core.config.adapter_config import HoldAdapters
from core.config.cluster_config import EngineConfig
from core.errors import Hung, OutOfMemory
from core.plan import FailedSeq, StepPlan, StepResult
from core.ports import Clock, OnReady, WorkerGroup
from core.types import Request, SamplingParams, TokenOut
from device.poller import Poller
from engine.execution.inline_group import InlineGroup
from engine.execution.launching_group import LaunchingGroup
from engine.loop import Engine
from engine.planning.step_bounds import PATIENCE, StepBounds
from engine.planning.step_scheduler import StepScheduler
from sim.virtual_loop import LoopClock, run_virtual
from tests.engine.fifo_policy import FifoPolicy
from tests.patience import PATIENCE_S, until
from tests.property.fake_rank import FakeRank

GRACE_S = 5.0
BLOCKS, BLOCK_SIZE = 100, 4


class Events:
    """core.ports.EngineEvents"""

    def __init__(self) -> None:
        self.tokens: list[TokenOut] = []
        self.error: BaseException | None = None
        self.error_at = 0.0

    def on_tokens(self, tokens: list[TokenOut]) -> None:
        self.tokens += tokens

    def on_stuck(self, keys: list[str]) -> None: ...
    def on_taken_back(self, paused: list[str], lost: list[str]) -> None: ...
    def on_failed(self, failed: Sequence[FailedSeq]) -> None: ...
    def on_error(self, error: BaseException) -> None:
        self.error, self.error_at = error, asyncio.get_running_loop().time()


class Ranks:
    """A WorkerGroup whose steps take as long as the test says."""

    def __init__(self, step_s: float = 0.01) -> None:
        self.rank = FakeRank(BLOCKS, BLOCK_SIZE, random.Random(0), 0.0)
        self.step_s, self.hangs_from, self.slow_at = step_s, inf, inf
        self.is_slow = False
        self.hung_at = self.given_up_at = 0.0
        self.short_at = -1
        """The step that finds no memory."""
        self._turn = asyncio.Lock()

    async def execute(self, plan: StepPlan) -> StepResult:
        async with self._turn:
            loop = asyncio.get_running_loop()
            if plan.step >= self.hangs_from:
                self.hung_at = self.hung_at or loop.time()
                await loop.create_future()
            if plan.step == self.short_at:
                raise OutOfMemory("none")
            self.is_slow = plan.step == self.slow_at
            await asyncio.sleep(2 * GRACE_S if self.is_slow else self.step_s)
            self.is_slow = False
            return replace(self.rank.step(plan), duration_s=self.step_s)

    async def hold_adapters(self, asked: HoldAdapters) -> dict[str, str]:
        await asyncio.sleep(2 * GRACE_S)
        return {}

    def on_ready(self, hear: OnReady) -> None: ...
    async def lost(self) -> Exception:
        return await asyncio.get_running_loop().create_future()

    async def give_up(self, why: str) -> Hung:
        await asyncio.sleep(0.1)  # ending processes takes a moment
        self.given_up_at = asyncio.get_running_loop().time()
        return Hung(why)

    async def close(self) -> None: ...


@asynccontextmanager
async def running(
    group: WorkerGroup,
    events: Events,
    clock: Clock,
    grace_s: float = GRACE_S,
    held_up: Callable[[], bool] = lambda: False,
) -> AsyncGenerator[Engine]:
    config = EngineConfig(block_size=BLOCK_SIZE, max_batch_tokens=16)
    scheduler = StepScheduler(config, BLOCKS, 380, FifoPolicy())
    engine = Engine(scheduler, group, clock, bounds=StepBounds(grace_s), held_up=held_up)
    task = asyncio.create_task(engine.run(events))
    try:
        yield engine
    finally:
        await engine.close()
        await task


def request(num_prompt: int = 10, max_tokens: int = 100) -> Request:
    sampling = SamplingParams(temperature=0.0, max_tokens=max_tokens)
    return Request(id="r", prompt=tuple(range(2, 2 + num_prompt)), sampling=sampling, reply_to="")


async def has_failed(events: Events, within_s: float) -> None:
    async with asyncio.timeout(within_s):
        while events.error is None:
            await asyncio.sleep(0.05)


async def outlives(events: Events, group: Ranks, num_tokens: int) -> None:
    """All tokens come, in virtual time."""
    async with asyncio.timeout(1e6):
        while len(events.tokens) < num_tokens:
            assert events.error is None, events.error
            await asyncio.sleep(group.step_s)


def test_a_step_that_hangs_is_given_up_after_the_grace_and_its_ranks_first() -> None:
    async def main() -> None:
        group, events = Ranks(), Events()
        group.hangs_from = 30
        async with running(group, events, LoopClock()) as engine:
            engine.add(request())
            await has_failed(events, 100)
        assert isinstance(events.error, Hung)
        assert "step 30, of 1 tokens in 1 sequences" in str(events.error)
        assert group.hung_at + GRACE_S < group.given_up_at < group.hung_at + GRACE_S + 1.0
        assert events.error_at >= group.given_up_at, "requests go on elsewhere when the ranks have ended"

    run_virtual(main())


def test_the_first_step_may_take_minutes_and_the_others_as_long_as_it() -> None:
    async def main() -> None:
        group, events = Ranks(step_s=500.0), Events()
        async with running(group, events, LoopClock()) as engine:
            engine.add(request(max_tokens=3))
            await outlives(events, group, 3)

    run_virtual(main())


def test_a_long_prompt_on_a_slow_processor_has_its_time() -> None:
    class Slow(Ranks):
        async def execute(self, plan: StepPlan) -> StepResult:
            self.step_s = 2.0 * plan.num_tokens
            return await super().execute(plan)

    async def main() -> None:
        group, events = Slow(), Events()
        async with running(group, events, LoopClock()) as engine:
            engine.add(request(num_prompt=3, max_tokens=2))
            await outlives(events, group, 2)
            engine.add(replace(request(num_prompt=300, max_tokens=2), id="long"))
            await outlives(events, group, 4)

    run_virtual(main())


def test_a_step_that_waits_for_others_has_longer() -> None:
    async def main() -> None:
        group, events = Ranks(), Events()
        group.slow_at = 30
        async with running(group, events, LoopClock(), held_up=lambda: group.is_slow) as engine:
            engine.add(request())
            await outlives(events, group, 100)

    run_virtual(main())


def test_a_step_beside_adapters_that_load_has_longer() -> None:
    async def main() -> None:
        group, events = Ranks(), Events()
        group.slow_at = 30
        async with running(group, events, LoopClock()) as engine:
            engine.add(request())
            while not group.is_slow:
                await asyncio.sleep(group.step_s / 2)
            loading = asyncio.create_task(engine.hold_adapters(HoldAdapters((), (), 0)))
            await outlives(events, group, 100)
            await loading

    run_virtual(main())


def test_what_a_step_waits_for_may_not_take_for_ever_either() -> None:
    async def main() -> None:
        group, events = Ranks(), Events()
        group.hangs_from = 30
        async with running(group, events, LoopClock(), held_up=lambda: True) as engine:
            engine.add(request())
            await has_failed(events, 1000)
        assert PATIENCE * GRACE_S < events.error_at - group.hung_at < (PATIENCE + 1) * GRACE_S

    run_virtual(main())


def test_time_in_which_the_process_stood_still_does_not_count() -> None:
    """As when all of it is stopped, or its clock jumps."""

    async def main() -> None:
        group, events, loop = Ranks(step_s=1.0), Events(), asyncio.get_running_loop()
        moved_s, time = 0.0, loop.time
        loop.time = lambda: time() + moved_s  # type: ignore[method-assign]
        async with running(group, events, LoopClock()) as engine:
            engine.add(request(max_tokens=60))
            for _ in range(20):
                await outlives(events, group, len(events.tokens) + 1)
                await asyncio.sleep(0.4 * group.step_s)
                moved_s += 3600.0
            await outlives(events, group, 60)

    run_virtual(main())


def test_a_step_that_hangs_behind_one_without_memory_is_given_up() -> None:
    async def main() -> None:
        group, events = Ranks(), Events()
        group.short_at, group.hangs_from = 30, 31
        async with running(group, events, LoopClock()) as engine:
            engine.add(request())
            await has_failed(events, 100)
        assert isinstance(events.error, Hung)

    run_virtual(main())


class HungDevice:
    """A launcher whose work ends at once, and from the 20th step on never, as a graph whose replay waits for ever."""

    def __init__(self) -> None:
        self._rank = FakeRank(BLOCKS, BLOCK_SIZE, random.Random(0), 0.0)

    def awaits(self, plan: StepPlan) -> dict[str, str]:
        return {}

    def launch(self, plan: StepPlan) -> Any:
        over = SimpleNamespace(query=lambda: plan.step < 20)
        return SimpleNamespace(number=plan.step, plan=plan, started_at=0.0, over=over, ends_first=False)

    def finish(self, launched: Any) -> StepResult:
        return self._rank.step(launched.plan)

    def mark(self) -> Any:
        return SimpleNamespace(query=lambda: True)

    def close(self) -> None: ...


async def test_a_device_that_hangs_under_a_thread_of_this_process_is_given_up_and_not_waited_for() -> None:
    events, launcher = Events(), HungDevice()
    await _fails_on_its_own(LaunchingGroup(launcher, launcher.finish, Poller()), events)


async def _fails_on_its_own(group: WorkerGroup, events: Events) -> None:
    async with running(group, events, WallClock(), grace_s=0.3) as engine:
        engine.add(request())
        await until(lambda: events.error is not None)
    assert isinstance(events.error, Hung)
    assert events.error.runs_on, "only the end of this process ends it"


async def test_a_thread_that_hangs_is_not_heard_any_more_when_it_goes_on() -> None:
    events, let_go, went_on = Events(), threading.Event(), threading.Event()
    rank = FakeRank(BLOCKS, BLOCK_SIZE, random.Random(0), 0.0)

    def step(plan: StepPlan) -> StepResult:
        if plan.step == 10:
            let_go.wait(PATIENCE_S)
            went_on.set()
        return rank.step(plan)

    await _fails_on_its_own(InlineGroup(step), events)
    num_tokens = len(events.tokens)
    let_go.set()
    await asyncio.to_thread(went_on.wait, PATIENCE_S)
    await asyncio.sleep(0)
    assert len(events.tokens) == num_tokens


def test_the_event_loop_keeps_no_ranks_of_an_engine_that_was_closed() -> None:
    """A sleeping instance collects its engine's pool once, as soon as it has closed it."""

    async def main() -> None:
        group, events = Ranks(), Events()
        async with running(group, events, LoopClock()) as engine:
            engine.add(request(max_tokens=3))
            await outlives(events, group, 3)
        is_there = weakref.ref(group)
        del engine, group
        gc.collect()
        assert is_there() is None

    run_virtual(main())
