"""The one rank of an instance on a device with streams of its own: a thread that launches steps (`launched_steps.py`)."""

import asyncio
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress

from core.adapter_config import HoldAdapters
from core.plan import StepPlan, StepResult
from core.ports import OnReady
from device.poller import Poller
from engine.execution.grammar_masks import GrammarMasks, tell_on_loop
from engine.execution.held_adapters import HeldAdapters
from engine.execution.launched_steps import LaunchedSteps, Launcher
from engine.execution.runner import LaunchedStep


class LaunchingGroup:
    """A core.ports.WorkerGroup."""

    def __init__(
        self,
        launcher: Launcher,
        finish: Callable[[LaunchedStep], StepResult],
        poller: Poller,
        grammars: GrammarMasks | None = None,
        adapters: HeldAdapters | None = None,
    ) -> None:
        """`finish` is the launcher's. `grammars`: those that it draws with; None: it puts no draw off. `adapters`: those of its
        model; None: it takes none."""
        self._grammars, self._adapters = grammars, adapters
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="baton-rank")
        self._steps = LaunchedSteps(launcher, finish, poller, self._look)

    async def execute(self, plan: StepPlan) -> StepResult:
        result: Future[StepResult] = Future()
        self._thread.submit(self._steps.execute, plan, lambda what: _tell(result, what))
        return await asyncio.wrap_future(result)

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
        """Wait for the steps in flight and end the thread."""
        self._thread.submit(self._steps.close)
        await asyncio.to_thread(self._thread.shutdown, wait=True)

    def _look(self) -> None:
        with suppress(RuntimeError):  # the thread has ended, and nobody waits for results any more
            self._thread.submit(self._steps.take)


def _tell(result: Future[StepResult], what: StepResult | BaseException) -> None:
    if not result.set_running_or_notify_cancel():
        return
    if isinstance(what, BaseException):
        result.set_exception(what)
    else:
        result.set_result(what)
