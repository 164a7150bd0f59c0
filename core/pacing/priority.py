"""Which sequences take part in a step where classes of several priorities are served.

The class of higher priority comes first. Sequences of lower ones decode beside it as far as its targets allow. Otherwise they are
left out of the step and keep their KV. None stands still for good: a sequence that falls behind a share of the pace that its own
class promises takes part whatever it costs the others."""

from collections.abc import Iterable
from collections.abc import Sequence as Seq
from math import inf

from core.cost.steps import StepModels
from core.pacing.pacing import slack_s
from core.ports import S, ServedSequence
from core.scheduler_tuning import SchedulerTuning


def taking_part(decoding: Seq[S], steps: StepModels, starts_at: float, tuning: SchedulerTuning) -> list[S]:
    """Return the sequences of `decoding` that the step which begins at `starts_at` should compute, higher priority first.

    The order within a priority stays as it is."""
    ordered = sorted(decoding, key=_priority, reverse=True)
    model = steps.decode
    taken: list[S] = []
    context, limit_s, level = 0, inf, inf
    for seq in ordered:
        if _priority(seq) < level:
            level = _priority(seq)
            limit_s = _limit_s(taken, context, steps, starts_at, tuning)
        length = len(seq.tokens)
        fits = limit_s == inf or model.step_s(len(taken) + 1, context + length, len(taken) + 1) <= limit_s
        if fits or _is_behind(seq, starts_at, tuning.least_share):
            taken.append(seq)
            context += length
    return taken


def tokens_by_priority(
    priorities: Iterable[int], missing: Iterable[tuple[ServedSequence, int]]
) -> tuple[tuple[int, int], ...]:
    """Return (priority, `missing` tokens of its sequences), the lowest first, of these priorities and those of the sequences."""
    tokens: dict[int, int] = dict.fromkeys(priorities, 0)
    for seq, count in missing:
        priority = seq.request.slo.priority
        tokens[priority] = tokens.get(priority, 0) + count
    return tuple(sorted(tokens.items()))


def _limit_s(
    higher: Seq[ServedSequence],
    context_tokens: int,
    steps: StepModels,
    starts_at: float,
    tuning: SchedulerTuning,
) -> float:
    """Return how long a step may take beside `higher`, all sequences of higher priority that take part."""
    model = steps.decode
    if not higher or not model.num_steps:
        return inf
    stretched_s = tuning.stretch * model.step_s(len(higher), context_tokens, len(higher))
    if model.step_s(1, context_tokens / len(higher), 1) > min(seq.request.slo.tpot_s for seq in higher):
        return stretched_s
    next_due_s = min(slack_s(seq, starts_at) for seq in higher)
    return max(min(_in_time_s(seq, starts_at, tuning) for seq in higher), min(stretched_s, next_due_s))


def _in_time_s(seq: ServedSequence, starts_at: float, tuning: SchedulerTuning) -> float:
    """Return how long a step may take beside a sequence of a higher class, by how far it is behind."""
    share_s = tuning.class_share * seq.request.slo.tpot_s
    if inf in (seq.first_token_at, share_s):
        return share_s
    behind_s = starts_at - seq.first_token_at - seq.num_after_first * share_s
    return share_s - tuning.class_catch_up * max(0.0, behind_s)


def _is_behind(seq: ServedSequence, starts_at: float, least_share: float) -> bool:
    """Return whether it has had fewer tokens than its least share."""
    pace_s = seq.request.slo.tpot_s / least_share
    return inf not in (seq.first_token_at, pace_s) and (
        starts_at - seq.first_token_at > seq.num_after_first * pace_s
    )


def _priority(seq: ServedSequence) -> float:
    return float(seq.request.slo.priority)
