"""The one rank of an instance on a device with streams of its own: a thread that launches steps (`launched_steps.py`)."""

import asyncio
from collections.abc import Callable
from functools import partial

from core.config.adapter_config import HoldAdapters
from core.errors import Hung
from core.plan import StepPlan, StepResult
from core.ports import OnReady
from device.poller import Poller
from engine.execution.held_adapters import HeldAdapters
from engine.execution.launched_steps import LaunchedSteps, Launcher
from engine.execution.rank_thread import RankThread, StepAnswer
from engine.execution.runner import LaunchedStep
from engine.execution.sampling.grammar_masks import GrammarMasks, tell_on_loop


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
        """`finish` is the launcher's. `grammars`: those that it samples with; None: it puts no sample off. `adapters`: those of
        its model; None: it takes none."""
        self._grammars, self._adapters = grammars, adapters
        self._thread = thread = RankThread()
        self._steps = LaunchedSteps(launcher, finish, poller, lambda: thread.call(self._steps.take))

    def execute(self, plan: StepPlan) -> asyncio.Future[StepResult]:
        answer = StepAnswer[StepResult]()
        self._thread.call(partial(self._steps.execute, plan, answer))
        return answer.future

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
        """Wait for the steps in flight and end the thread."""
        self._thread.call(self._steps.close)
        await self._thread.close()
