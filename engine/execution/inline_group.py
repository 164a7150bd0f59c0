"""The ranks of an instance in this process: one compute thread, which executes the calls strictly in order."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

from core.plan import StepPlan, StepResult
from core.ports import OnReady
from engine.execution.grammar_masks import GrammarMasks


class InlineGroup:
    """A core.ports.WorkerGroup over `step`, which runs on a thread of its own."""

    def __init__(self, step: Callable[[StepPlan], StepResult], grammars: GrammarMasks | None = None) -> None:
        """`grammars`: those that `step` draws with; None: it puts no draw off."""
        self._step, self._grammars = step, grammars
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="baton-rank")

    async def execute(self, plan: StepPlan) -> StepResult:
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._step, plan)

    def on_ready(self, hear: OnReady) -> None:
        loop = asyncio.get_running_loop()

        def tell(key: str, num_tokens: int) -> None:
            with suppress(RuntimeError):  # the loop has ended, and nobody waits any more
                loop.call_soon_threadsafe(hear, key, num_tokens)

        if self._grammars is not None:
            self._grammars.on_ready(tell)

    async def lost(self) -> Exception:
        # Never: a rank in this process fails in `execute`, or the whole process ends.
        return await asyncio.get_running_loop().create_future()

    async def close(self) -> None:
        """Wait for the running step and end the thread."""
        await asyncio.to_thread(self._thread.shutdown, wait=True, cancel_futures=True)
