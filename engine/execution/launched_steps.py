"""Steps of one rank on a device with streams of its own: one is launched behind the step that computes.

The rank's thread launches steps, and reads the results of those that are over while the device computes the next. It waits for
the device only where a step needs a token on the host before it can be launched, or where ranks meet over what a step has
sampled.

Invariant: steps are launched, and their results given, in the order of the calls."""

import logging
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol

from core.errors import OutOfMemory
from core.plan import StepPlan, StepResult
from device.poller import Poller
from device.seam import Event
from engine.execution.batch.step_memory import NUM_STEPS
from engine.execution.out_of_memory import StepOrder
from engine.execution.runner import LaunchedStep

_log = logging.getLogger(__name__)

Say = Callable[[StepResult | BaseException], None]
"""Takes a step's result, or why there is none."""


class Launcher(Protocol):
    """engine.execution.runner.Runner says what each method does."""

    def awaits(self, plan: StepPlan) -> dict[str, str]: ...
    def launch(self, plan: StepPlan) -> LaunchedStep: ...
    def mark(self) -> Event: ...
    def close(self) -> None: ...


@dataclass(slots=True)
class _InFlight:
    step: LaunchedStep
    say: Say
    over_at: float | None = None
    """When the device was seen to be done with it, which may be while this thread launches the next step."""


class LaunchedSteps:
    """For one thread."""

    def __init__(
        self,
        launcher: Launcher,
        finish: Callable[[LaunchedStep], StepResult],
        poller: Poller,
        look: Callable[[], None],
    ) -> None:
        """`finish` is the launcher's. `look` is called on any thread when a step is over, and has `take` called on this one's."""
        self._launcher, self._finish, self._poller, self._look = launcher, finish, poller, look
        self._order = StepOrder()
        self._in_flight: deque[_InFlight] = deque()
        self._ended_at = 0.0
        """When the last step that is over ended."""

    def execute(self, plan: StepPlan, say: Say) -> None:
        """Launch a step. `say` is called on this thread, perhaps in a later call."""
        try:
            if self._must_settle(plan):
                self._settle()
            step = self._order.execute(plan, self._launcher.launch)
        except OutOfMemory as error:
            self._undo(say, error)
            return
        except BaseException as error:
            say(error)
            return
        in_flight = _InFlight(step, say)
        self._in_flight.append(in_flight)
        self._poller.when_done(step.over, lambda _: self._note_end(in_flight))

    def take(self) -> None:
        """Give the results of the steps that are over."""
        while self._in_flight:
            first = self._in_flight[0]
            try:
                if not first.step.over.query():
                    return
                result = self._timed(first)
            except OutOfMemory as error:
                self._order.failed(first.step.number)
                self._refuse(error)
                return
            except BaseException as error:
                self._in_flight.popleft()
                first.say(error)
                continue
            self._in_flight.popleft()
            first.say(result)

    def close(self) -> None:
        """Wait for the steps in flight."""
        try:
            if self._in_flight:
                self._settle()
            self._launcher.close()
        except Exception:
            _log.exception("the device has failed in the last step")

    def _must_settle(self, plan: StepPlan) -> bool:
        if not self._in_flight:
            return False
        is_full = len(self._in_flight) == NUM_STEPS
        return is_full or self._in_flight[-1].step.ends_first or bool(self._launcher.awaits(plan))

    def _settle(self) -> None:
        # A step needs what these have sampled, on the host: nothing can be launched before, so nothing is lost by waiting here.
        self._poller.wait([self._in_flight[-1].step.over])
        self.take()

    def _undo(self, say: Say, error: OutOfMemory) -> None:
        """Say that a step has found no memory, when the device works at nothing of it any more, nor at those before it."""
        try:
            self._poller.wait([self._launcher.mark()])
            self.take()
        except Exception as failed:
            say(failed)
        else:
            say(error)

    def _refuse(self, error: Exception) -> None:
        """Say of all steps that are in flight that they have failed, when the device works at none of them any more."""
        try:
            self._poller.wait([self._in_flight[-1].step.over])
        except Exception as failed:
            error = failed
        while self._in_flight:
            self._in_flight.popleft().say(error)

    def _note_end(self, in_flight: _InFlight) -> None:
        """Called on any thread."""
        in_flight.over_at = time.perf_counter()
        self._look()

    def _timed(self, in_flight: _InFlight) -> StepResult:
        """Count a step's time from when the device was free for it until it was over. Its result may be read much later, when the
        next step is launched: the two would then seem to take the time of both and none."""
        over_at = in_flight.over_at or time.perf_counter()
        began_at = max(in_flight.step.started_at, self._ended_at)
        self._ended_at = over_at
        return replace(self._finish(in_flight.step), duration_s=over_at - began_at)
