"""The ranks of an instance in this process: one compute thread, which executes the calls strictly in order."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from core.plan import StepPlan, StepResult


class InlineGroup:
    """A core.ports.WorkerGroup over `step`, which runs on a thread of its own."""

    def __init__(self, step: Callable[[StepPlan], StepResult]) -> None:
        self._step = step
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="baton-rank")

    async def execute(self, plan: StepPlan) -> StepResult:
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._step, plan)

    async def lost(self) -> Exception:
        return (
            await asyncio.get_running_loop().create_future()
        )  # a rank in this process fails in `execute` or with all of it

    async def close(self) -> None:
        """Wait for the running step and end the thread."""
        await asyncio.to_thread(self._thread.shutdown, wait=True, cancel_futures=True)
