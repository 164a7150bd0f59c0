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
        self.now, self._free_at = 0.0, 0.0
        self._events: list[tuple[float, Any]] = []

    def launch(self, plan: StepPlan) -> Any:
        started_at, is_decode = self.now, plan.step % 2
        self.go_on(REPLAYED_S if is_decode else LAUNCHED_S)
        compute_s = DECODE_S if is_decode else BEHIND_S
        over_at = self._free_at = max(self._free_at, self.now) + compute_s
        over = SimpleNamespace(query=lambda: self.now >= over_at, over_at=over_at)
        return SimpleNamespace(number=plan.step, started_at=started_at, over=over, ends_first=False)

    def go_on(self, duration_s: float) -> None:
        ends_at = self.now + duration_s
        for event in [event for event in self._events if event[0] <= ends_at]:
            self._events.remove(event)
            self.now = event[0]
            event[1](None)
        self.now = ends_at

    def awaits(self, plan: StepPlan) -> dict[str, str]:
        del plan
        return {}

    def when_done(self, event: Any, then: Any) -> None:
        self._events.append((event.over_at, then))


def test_a_step_takes_what_the_device_took_though_its_result_is_read_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    machine, said = Machine(), list[StepResult]()

    def finish(step: Any) -> StepResult:
        return StepResult(step=step.number, sampled=())

    monkeypatch.setattr(launched_steps, "time", SimpleNamespace(perf_counter=lambda: machine.now))
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
