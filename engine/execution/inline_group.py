"""The ranks of an instance in this process: one compute thread, which executes the calls strictly in order."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from core.adapter_config import HoldAdapters
from core.plan import StepPlan, StepResult
from core.ports import OnReady
from engine.execution.grammar_masks import GrammarMasks, tell_on_loop
from engine.execution.held_adapters import HeldAdapters
from engine.execution.out_of_memory import StepOrder


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
        self._step, self._grammars, self._adapters = step, grammars, adapters
        self._order = StepOrder()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="baton-rank")

    async def execute(self, plan: StepPlan) -> StepResult:
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._thread, self._order.execute, plan, self._step)

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
        await asyncio.to_thread(self._thread.shutdown, wait=True, cancel_futures=True)
