"""Prompts that are too late let others pass that can still be in time.

A missed target is no worse for a few seconds more, while each prompt that waits behind a missed one may miss its own. After
`yield_s` a late one takes its turn again, and one that has been begun gets a share of the time, so nothing starves."""

from collections.abc import Iterable
from math import inf

from core.cost.steps import StepModels
from core.ports import ServedSequence
from core.scheduler_tuning import SchedulerTuning
from core.types import Request


def due_at(request: Request) -> float:
    """Return when its first token is due, by the clock of `Request.arrival_at`; infinite where its class has no target."""
    return request.arrival_at + request.slo.ttft_s


def order_at(request: Request, tuning: SchedulerTuning) -> float:
    """Return the instant by which requests of one priority are ordered: when they are due, without a target as if
    `unnamed_s` were one. So requests with targets pass those without for a bounded time."""
    ttft_s = request.slo.ttft_s
    return request.arrival_at + (tuning.unnamed_s if ttft_s == inf else ttft_s)


def is_late(seq: ServedSequence, now: float, steps: StepModels, tuning: SchedulerTuning) -> bool:
    """Return whether its first token would miss its target even if the instance did nothing else from now on, and has not for
    long."""
    due = due_at(seq.request)
    if seq.num_output or now > due + tuning.yield_s or not tuning.late_yield:
        return False
    missing = len(seq.tokens) - seq.num_computed
    return now + steps.prompt.work_s(seq.num_computed, missing) > due


def late_tokens(
    missing: Iterable[tuple[ServedSequence, int]], now: float, steps: StepModels, tuning: SchedulerTuning
) -> int:
    """Return how many of the `missing` tokens of each sequence are of late prompts, which let others pass."""
    return sum(count for seq, count in missing if is_late(seq, now, steps, tuning))


def turn(seq: ServedSequence, now: float, steps: StepModels, tuning: SchedulerTuning) -> tuple[float, bool]:
    """Order prompts as core.ports.SchedulerPolicy.turn: what lacks its share first, then higher priority, and within one what is
    not late."""
    if _lacks_share(seq, now, steps, tuning):
        return -inf, False
    return -seq.request.slo.priority, is_late(seq, now, steps, tuning)


def _lacks_share(seq: ServedSequence, now: float, steps: StepModels, tuning: SchedulerTuning) -> bool:
    """Return whether less of a prompt has been computed than its least share of the time since others need not pass it."""
    if seq.num_output or not seq.num_computed:
        return False
    passed_s = now - order_at(seq.request, tuning) - tuning.yield_s
    return steps.prompt.work_s(0, seq.num_computed) < tuning.least_share * passed_s
