"""A step's time is what the device took for it, whenever the host reads its result."""

from types import SimpleNamespace
from typing import Any

import pytest

from core.plan import StepPlan, StepResult
from engine.execution import launched_steps
from engine.execution.launched_steps import LaunchedSteps

LAUNCHED_S, REPLAYED_S = 30.0, 3.0
"""The host launches a step with a prompt, and a decode step, for so long."""
BEHIND_S, DECODE_S = 1.0, 6.0
"""The device is done with a step with a prompt so long after it was launched. It computes a decode step for so long."""


class Machine:
    """A host that launches, and a device that computes at the same time. It is the launcher and the poller."""

    def __init__(self) -> None:
        self.now_s, self._free_s = 0.0, 0.0
        self._events: list[tuple[float, Any]] = []

    def launch(self, plan: StepPlan) -> Any:
        started_s, is_decode = self.now_s, plan.step % 2
        self.go_on(REPLAYED_S if is_decode else LAUNCHED_S)
        compute_s = DECODE_S if is_decode else BEHIND_S
        over_s = self._free_s = max(self._free_s, self.now_s) + compute_s
        over = SimpleNamespace(query=lambda: self.now_s >= over_s, over_s=over_s)
        return SimpleNamespace(number=plan.step, started_s=started_s, over=over, ends_first=False)

    def go_on(self, duration_s: float) -> None:
        until_s = self.now_s + duration_s
        for event in [event for event in self._events if event[0] <= until_s]:
            self._events.remove(event)
            self.now_s = event[0]
            event[1](None)
        self.now_s = until_s

    def awaits(self, plan: StepPlan) -> dict[str, str]:
        del plan
        return {}

    def when_done(self, event: Any, then: Any) -> None:
        self._events.append((event.over_s, then))


def test_a_step_takes_what_the_device_took_though_its_result_is_read_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    machine, said = Machine(), list[StepResult]()

    def finish(step: Any) -> StepResult:
        return StepResult(step=step.number, sampled=())

    monkeypatch.setattr(launched_steps, "time", SimpleNamespace(perf_counter=lambda: machine.now_s))
    launcher: Any = machine
    steps = LaunchedSteps(launcher, finish, launcher, lambda: None)
    for number in range(6):
        steps.execute(StepPlan(step=number, new=(), copies=(), work=(), drop=()), said.append)  # type: ignore[arg-type]
        steps.take()
    machine.go_on(LAUNCHED_S)
    steps.take()
    assert [each.step for each in said] == list(range(6))
    assert [each.duration_s for each in said[:2]] == [LAUNCHED_S + BEHIND_S, REPLAYED_S + DECODE_S - BEHIND_S]
    # The host launches a step with a prompt while the device computes the decode step before it, and is not done by then.
    assert [each.duration_s for each in said[2::2]] == [25.0, 25.0]
    assert [each.duration_s for each in said[3::2]] == [8.0, 8.0]
