"""The ranks of an instance in this process: one compute thread, which executes the calls strictly in order."""

import asyncio
from collections.abc import Callable
from functools import partial

from core.config.adapter_config import HoldAdapters
from core.errors import Hung
from core.plan import StepPlan, StepResult
from core.ports import OnReady
from engine.execution.held_adapters import HeldAdapters
from engine.execution.out_of_memory import StepOrder
from engine.execution.rank_thread import RankThread, StepAnswer
from engine.execution.sampling.grammar_masks import GrammarMasks, tell_on_loop


class InlineGroup:
    """A core.ports.WorkerGroup over `step`, which runs on a thread of its own."""

    def __init__(
        self,
        step: Callable[[StepPlan], StepResult],
        grammars: GrammarMasks | None = None,
        adapters: HeldAdapters | None = None,
    ) -> None:
        """`grammars`: those that `step` samples with; None: it puts no sample off. `adapters`: those of its model; None: it takes
        none."""
        self._grammars, self._adapters = grammars, adapters
        self._step, self._order, self._thread = step, StepOrder(), RankThread()
        self._is_closed = False

    def execute(self, plan: StepPlan) -> asyncio.Future[StepResult]:
        answer = StepAnswer[StepResult]()
        self._thread.call(partial(self._execute, plan, answer))
        return answer.future

    def _execute(self, plan: StepPlan, answer: StepAnswer[StepResult]) -> None:
        if self._is_closed or answer.future.cancelled():
            answer(asyncio.CancelledError())
            return
        try:
            answer(self._order.execute(plan, self._step))
        except BaseException as error:
            answer(error)

    async def hold_adapters(self, asked: HoldAdapters) -> dict[str, str]:
        assert self._adapters is not None, "adapters of a model that takes none are refused before"
        return await asyncio.to_thread(self._adapters.hold, asked)

    def on_ready(self, hear: OnReady) -> None:
        if self._grammars is not None:
            self._grammars.on_ready(tell_on_loop(hear))

    async def lost(self) -> Exception:
        # Never: a rank in this process fails in `execute`, or the whole process ends.
        return await asyncio.get_running_loop().create_future()

    async def give_up(self, why: str) -> Hung:
        """Leave the thread to itself: nothing ends it before its process does. What it does from now on is heard by nobody."""
        self._thread.leave()
        return Hung(why, runs_on=True)

    async def close(self) -> None:
        """Wait for the running step and end the thread. Later ones are cancelled. The model and its pool are let go: only a
        search for garbage, which takes long, frees what refers to the group."""
        self._is_closed = True
        await self._thread.close()
        self._step, self._grammars, self._adapters = _closed, None, None


def _closed(_: StepPlan) -> StepResult:
    raise AssertionError("a step of a group that is closed")
