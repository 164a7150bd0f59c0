"""The ranks of an instance in this process: one compute thread, which executes the calls strictly in order."""

import asyncio
from collections.abc import Callable

from core.adapter_config import HoldAdapters
from core.plan import StepPlan, StepResult
from core.ports import OnReady
from engine.execution.grammar_masks import GrammarMasks, tell_on_loop
from engine.execution.held_adapters import HeldAdapters
from engine.execution.out_of_memory import StepOrder
from engine.execution.rank_thread import RankThread


class InlineGroup:
    """A core.ports.WorkerGroup over `step`, which runs on a thread of its own."""

    def __init__(
        self,
        step: Callable[[StepPlan], StepResult],
        grammars: GrammarMasks | None = None,
        adapters: HeldAdapters | None = None,
    ) -> None:
        """`grammars`: those that `step` draws with; None: it puts no draw off. `adapters`: those of its model; None: it takes
        none."""
        self._grammars, self._adapters = grammars, adapters
        order = StepOrder()
        self._thread = RankThread[StepPlan, StepResult](lambda plan: order.execute(plan, step))

    def execute(self, plan: StepPlan) -> asyncio.Future[StepResult]:
        return self._thread.call(plan)

    async def hold_adapters(self, asked: HoldAdapters) -> dict[str, str]:
        assert self._adapters is not None, "adapters of a model that takes none are refused before"
        return await asyncio.to_thread(self._adapters.hold, asked)

    def on_ready(self, hear: OnReady) -> None:
        if self._grammars is not None:
            self._grammars.on_ready(tell_on_loop(hear))

    async def lost(self) -> Exception:
        # Never: a rank in this process fails in `execute`, or the whole process ends.
        return await asyncio.get_running_loop().create_future()

    async def close(self) -> None:
        """Wait for the running step and end the thread."""
        await self._thread.close()
