"""The one rank of an instance on a device with streams of its own: one step is launched behind the step that computes.

The compute thread launches steps, and reads the results of those that are over while the device computes the next. It waits for
the device only where a step needs a token on the host before it can be launched.

Invariant: steps are launched, and their results given, in the order of the calls."""

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Protocol

from core.errors import OutOfMemory
from core.plan import StepPlan, StepResult
from core.ports import OnReady
from device.poller import Poller
from device.seam import Event
from engine.execution.grammar_masks import GrammarMasks, tell_on_loop
from engine.execution.out_of_memory import StepOrder
from engine.execution.runner import LaunchedStep
from engine.execution.step_memory import NUM_STEPS

_log = logging.getLogger(__name__)


class Launcher(Protocol):
    """engine.execution.runner.Runner says what each method does."""

    def awaits(self, plan: StepPlan) -> dict[str, str]: ...
    def launch(self, plan: StepPlan) -> LaunchedStep: ...
    def mark(self) -> Event: ...
    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class _InFlight:
    step: LaunchedStep
    result: Future[StepResult]


class LaunchingGroup:
    """A core.ports.WorkerGroup."""

    def __init__(
        self,
        launcher: Launcher,
        finish: Callable[[LaunchedStep], StepResult],
        poller: Poller,
        grammars: GrammarMasks | None = None,
    ) -> None:
        """`finish` is the launcher's. `grammars`: those that it draws with; None: it puts no draw off."""
        self._launcher, self._finish, self._poller, self._grammars = launcher, finish, poller, grammars
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="baton-rank")
        self._order = StepOrder()
        self._in_flight: deque[_InFlight] = deque()
        self._ended_s = 0.0
        """When the last step that is over ended."""

    async def execute(self, plan: StepPlan) -> StepResult:
        result: Future[StepResult] = Future()
        self._thread.submit(self._launch, plan, result)
        return await asyncio.wrap_future(result)

    def on_ready(self, hear: OnReady) -> None:
        if self._grammars is not None:
            self._grammars.on_ready(tell_on_loop(hear))

    async def lost(self) -> Exception:
        # Never: a rank in this process fails in `execute`, or the whole process ends.
        return await asyncio.get_running_loop().create_future()

    async def close(self) -> None:
        """Wait for the steps in flight and end the thread."""
        self._thread.submit(self._end)
        await asyncio.to_thread(self._thread.shutdown, wait=True)

    def _launch(self, plan: StepPlan, result: Future[StepResult]) -> None:
        try:
            if len(self._in_flight) == NUM_STEPS or (self._in_flight and self._launcher.awaits(plan)):
                self._settle()
            step = self._order.execute(plan, self._launcher.launch)
        except OutOfMemory as error:
            self._undo(result, error)
            return
        except BaseException as error:
            _say(result, error)
            return
        self._in_flight.append(_InFlight(step, result))
        self._poller.when_done(step.over, lambda _: self._look())

    def _look(self) -> None:
        with suppress(RuntimeError):  # the thread has ended, and nobody waits for results any more
            self._thread.submit(self._take)

    def _settle(self) -> None:
        # A step needs what these have drawn, on the host: nothing can be launched before, so nothing is lost by waiting here.
        self._poller.wait([self._in_flight[-1].step.over])
        self._take()

    def _undo(self, result: Future[StepResult], error: OutOfMemory) -> None:
        """Say that a step has found no memory, when the device works at nothing of it any more, nor at those before it."""
        try:
            self._poller.wait([self._launcher.mark()])
            self._take()
        except Exception as failed:
            _say(result, failed)
        else:
            _say(result, error)

    def _take(self) -> None:
        """Give the results of the steps that are over."""
        while self._in_flight:
            first = self._in_flight[0]
            try:
                if not first.step.over.query():
                    return
                result = self._timed(first.step)
            except OutOfMemory as error:
                self._order.failed(first.step.number)
                self._refuse(error)
                return
            except BaseException as error:
                self._in_flight.popleft()
                _say(first.result, error)
                continue
            self._in_flight.popleft()
            _say(first.result, result)

    def _refuse(self, error: Exception) -> None:
        """Say of all steps that are in flight that they have failed, when the device works at none of them any more."""
        try:
            self._poller.wait([self._in_flight[-1].step.over])
        except Exception as failed:
            error = failed
        while self._in_flight:
            _say(self._in_flight.popleft().result, error)

    def _timed(self, step: LaunchedStep) -> StepResult:
        """Count a step's time from when the device was free for it."""
        now, began = time.perf_counter(), max(step.started_s, self._ended_s)
        self._ended_s = now
        return replace(self._finish(step), duration_s=now - began)

    def _end(self) -> None:
        try:
            if self._in_flight:
                self._settle()
            self._launcher.close()
        except Exception:
            _log.exception("the device has failed in the last step")


def _say(to: Future[StepResult], what: StepResult | BaseException) -> None:
    if not to.set_running_or_notify_cancel():
        return
    if isinstance(what, BaseException):
        to.set_exception(what)
    else:
        to.set_result(what)
