"""Prompts that are too late let others pass that can still be in time.

A missed target is no worse for a few seconds more, while each prompt that waits behind a missed one may miss its own. After
`YIELD_S` a late one takes its turn again, so nothing starves."""

from typing import Final

from core.ports import ServedSequence
from core.steps import StepModels
from core.types import Request

YIELD_S: Final = 10.0
"""After its target a late prompt lets others of its class pass for so long."""


def due_s(request: Request) -> float:
    """Return when its first token is due, by the clock of `Request.arrival_s`."""
    return request.arrival_s + request.slo.ttft_s


def is_late(seq: ServedSequence, now: float, steps: StepModels) -> bool:
    """Return whether its first token would miss its target even if the instance did nothing else from now on, and has not for
    long."""
    due = due_s(seq.request)
    if seq.num_output or now > due + YIELD_S:
        return False
    missing = len(seq.tokens) - seq.num_computed
    return now + steps.prompt.work_s(seq.num_computed, missing) > due


def turn(seq: ServedSequence, now: float, steps: StepModels) -> tuple[int, bool]:
    """Order prompts as core.ports.SchedulerPolicy.turn: higher priority first, and within one what is not late."""
    return -seq.request.slo.priority, is_late(seq, now, steps)
