"""Waits for steps, and gives the ranks up where one does not end.

Time is counted in ticks of the event loop. A tick that comes late counts as one: a process that was itself stopped, or that
hardly gets a processor, gives its steps their full time."""

import asyncio
from collections.abc import Callable, Generator
from contextlib import contextmanager

from core.cost.steps import UNKNOWN_STEPS, StepModels
from core.errors import Hung
from core.plan import StepPlan, StepResult
from core.ports import WorkerGroup
from engine.planning.step_bounds import PATIENCE, StepBounds
from engine.planning.step_time_fit import expected_s

_TICK_S = 0.25


class StepWatch:
    """For one event loop, and one step at a time."""

    def __init__(
        self,
        group: WorkerGroup,
        bounds: StepBounds | None = None,
        held_up: Callable[[], bool] = lambda: False,
    ) -> None:
        """`bounds`: how long steps may take; None: for ever. `held_up`: whether the step waits for others, and not for its ranks.
        Such time counts less."""
        self._group, self._bounds, self._held_up = group, bounds, held_up
        self._num_disturbing = 0
        self._plan: StepPlan | None = None
        self._task: asyncio.Future[StepResult] | None = None
        self._steps = UNKNOWN_STEPS
        """What was known of steps when this one began."""
        self._counted_s = self._counted_at = 0.0
        self._ticking: asyncio.TimerHandle | None = None
        self._giving_up: asyncio.Task[None] | None = None
        self._hung: Hung | None = None

    async def result(
        self, plan: StepPlan, task: "asyncio.Future[StepResult]", steps: StepModels
    ) -> StepResult:
        """Wait for the step's result. Raises what the step raises, and Hung."""
        if self._bounds is None:
            return await task
        self._begin(plan, task, steps)
        try:
            result = await task
            self._count(asyncio.get_running_loop().time())
            self._bounds.observe(plan, self._counted_s)
            return result
        except asyncio.CancelledError:
            if self._hung is None:
                raise
            raise self._hung from None
        finally:
            self._plan = self._task = None

    def close(self) -> None:
        """Let go of all that the event loop would keep until the next tick. No step follows."""
        if self._ticking is not None:
            self._ticking.cancel()
            self._ticking = None

    @contextmanager
    def disturbed(self) -> Generator[None]:
        """Meanwhile something else takes from the steps' time."""
        self._num_disturbing += 1
        try:
            yield
        finally:
            self._num_disturbing -= 1

    def _begin(self, plan: StepPlan, task: "asyncio.Future[StepResult]", steps: StepModels) -> None:
        loop = asyncio.get_running_loop()
        self._plan, self._task, self._steps = plan, task, steps
        self._counted_s, self._counted_at = 0.0, loop.time()
        if self._ticking is None:
            self._ticking = loop.call_later(_TICK_S, self._tick)

    def _tick(self) -> None:
        """Count the time of a step that runs. Without one the ticks end until the next one begins."""
        self._ticking, plan = None, self._plan
        if plan is None or self._bounds is None or self._giving_up is not None:
            return
        loop = asyncio.get_running_loop()
        self._count(loop.time())
        if self._counted_s <= self._bounds.bound_s(plan, self._steps):
            self._ticking = loop.call_later(_TICK_S, self._tick)
            return
        why = (
            f"step {plan.step}, of {plan.num_tokens} tokens in {len(plan.work)} sequences, has not ended after "
            f"{self._counted_s:.1f} s (expected: {expected_s(plan, self._steps):.2f} s)"
        )
        self._giving_up = asyncio.create_task(self._give_up(why))

    def _count(self, now: float) -> None:
        is_held_up = self._num_disturbing or self._held_up()
        self._counted_s += min(_TICK_S, now - self._counted_at) / (PATIENCE if is_held_up else 1.0)
        self._counted_at = now

    async def _give_up(self, why: str) -> None:
        """End the ranks, and then the waiting for them."""
        self._hung = await self._group.give_up(why)
        if self._task is not None:
            self._task.cancel()
