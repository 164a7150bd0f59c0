"""How long outputs are, for each class and tenant, learned from those that have ended and from those that still run.

Invariant: what is expected of a tenant's outputs in a class, before any is known, is what is known of the class; of a class, what
is known of all; and of all, a mean of 256 tokens. It counts as a few outputs
(`SchedulerTuning.num_expected`), so nothing jumps."""

from typing import Final

from cluster.scheduler.fleet.length_curve import LengthCounts, LengthCurve, bucket_of, expected_curve
from core.scheduler_tuning import DEFAULT_TUNING, SchedulerTuning

_MAX_REMEMBERED: Final = 4096
_NEWS_PART: Final = 32
_MOST_NEWS: Final = 256
"""A distribution is worked out anew when one in so many of its counts is news, or this many are."""


class OutputLengths:
    def __init__(self, tuning: SchedulerTuning = DEFAULT_TUNING) -> None:
        self._tuning = tuning
        self._of: dict[tuple[str, str], _Known] = {}
        self._expected = expected_curve(tuning.expected_tokens, tuning.length_shape)

    @property
    def num_ended(self) -> int:
        known = self._of.get(("", ""))
        return 0 if known is None else known.counts.num_ended

    def begin(self, tenant: str, slo_class: str) -> "RunningOutput":
        """Return what is to be told how an output of this tenant and class grows and ends."""
        found: list[_Known] = []
        for key in _keys(tenant, slo_class):
            known = self._of.pop(key, None) or _Known(self._tuning)
            self._of[key] = known
            found.append(known)
        if len(self._of) > _MAX_REMEMBERED:
            del self._of[next(iter(self._of))]
        return RunningOutput(found)

    def curve(self, tenant: str, slo_class: str) -> LengthCurve:
        curve = self._expected
        for key in _keys(tenant, slo_class):
            known = self._of.get(key)
            if known is not None:
                curve = known.curve(curve)
        return curve


class RunningOutput:
    """One output, from its first token on."""

    __slots__ = ("_bucket", "_known")

    def __init__(self, known: list["_Known"]) -> None:
        self._known, self._bucket = known, -1

    def grown(self, num_tokens: int) -> None:
        """Learn that it has so many tokens, and may go on."""
        bucket = bucket_of(num_tokens)
        if bucket > self._bucket:
            for known in self._known:
                known.counts.enter(bucket, self._bucket)
            self._bucket = bucket

    def ended(self, num_tokens: int) -> None:
        self.grown(num_tokens)
        for known in self._known:
            known.counts.end(self._bucket, num_tokens)


class _Known:
    """What is known of the outputs of a tenant in a class, of a class, or of all."""

    __slots__ = ("_curve", "_due", "_num_expected", "counts")

    def __init__(self, tuning: SchedulerTuning) -> None:
        self.counts, self._num_expected = LengthCounts(tuning.length_decay), tuning.num_expected
        self._curve: LengthCurve | None = None
        self._due = 0
        """The number of changes with which the distribution is worked out anew."""

    def curve(self, expected: LengthCurve) -> LengthCurve:
        curve, num_changes = self._curve, self.counts.num_changes
        if curve is None or num_changes >= self._due:
            curve = self._curve = self.counts.curve(expected, self._num_expected)
            self._due = num_changes + 1 + min(_MOST_NEWS, num_changes // _NEWS_PART)
        return curve


def _keys(tenant: str, slo_class: str) -> tuple[tuple[str, str], ...]:
    """Return what an output counts for, from all outputs to those of its tenant and class."""
    if not tenant:
        return (("", ""), ("", slo_class)) if slo_class else (("", ""),)
    return (("", ""), ("", slo_class), (tenant, slo_class)) if slo_class else (("", ""), (tenant, ""))
