"""What draft tokens have really gained: the pace of steps with them by that of steps without.

The step-time model says what one more token costs, as far as steps have differed. It does not know how long ranks wait for a step
that is not planned ahead, nor that a device may compute a few tokens more for nothing and some more for much, and it is far off
where all steps are alike. So the time from commit to commit is measured, too."""

from dataclasses import dataclass
from math import inf, log2

from core.plan import StepPlan, StepResult

_WEIGHT = 1 / 16
"""What the newest step counts."""
_FURTHEST = 2.0
"""A step whose time is off by more than this factor was disturbed, and teaches no more than this."""
_LONGEST_WAIT = 3.0
"""The longest time from commit to commit, by the step's own: nothing has run before that."""
_LEAST_STEPS = 4
"""Steps without draft tokens before any with them. Twice as many of those before their pace counts, since it varies more."""


@dataclass(frozen=True, slots=True)
class StepTime:
    took_s: float
    """From the commit before."""
    lost_s: float
    """How much longer that is than what its tokens take without draft tokens; 0 where none slowed it, or that is not known."""


@dataclass(slots=True)
class _Pace:
    """Means over recent steps."""

    took_s: float = 0.0
    sampled: float = 0.0
    """Tokens of each sequence."""
    count: int = 0

    def add(self, took_s: float, sampled: float) -> None:
        if self.count >= _LEAST_STEPS:
            took_s = max(self.took_s / _FURTHEST, min(self.took_s * _FURTHEST, took_s))
        self.count += 1
        weight = max(_WEIGHT, 1 / self.count)
        self.took_s += (took_s - self.took_s) * weight
        self.sampled += (sampled - self.sampled) * weight


class RealisedGain:
    """By the size of the batch: two of which one is half as large again as the other are not compared."""

    def __init__(self) -> None:
        self._paces: dict[tuple[int, bool], _Pace] = {}
        """By size, without draft tokens and with them."""
        self._committed_at, self._num_seqs, self._had_drafts = 0.0, 0, False

    def committed(self, plan: StepPlan, result: StepResult, now: float) -> StepTime:
        """Learn from a step, if the one before it was of the same sequences and neither computed prompts."""
        num_seqs = 0 if plan.size.num_prompt else len(plan.work)
        took_s = now - self._committed_at
        if result.duration_s:
            own_s = result.duration_s + result.proposing_s + result.reading_s
            took_s = min(took_s, _LONGEST_WAIT * own_s)
        has_drafts = plan.size.num_drafts > 0
        # The step behind one with draft tokens waits for it, too.
        is_slowed = has_drafts or self._had_drafts
        sampled = len(result.sampled)
        if has_drafts:
            sampled += sum(len(one.more) for one in result.sampled)
        lost_s = 0.0
        if num_seqs and took_s > 0 and sampled >= num_seqs:
            if is_slowed and self.is_known(num_seqs):
                plain = self._pace(num_seqs, has_drafts=False)
                lost_s = took_s - sampled / num_seqs * plain.took_s / plain.sampled
            if num_seqs == self._num_seqs:
                self._paces.setdefault((_size(num_seqs), is_slowed), _Pace()).add(took_s, sampled / num_seqs)
        self._committed_at, self._num_seqs, self._had_drafts = now, num_seqs, has_drafts
        return StepTime(took_s, lost_s)

    def is_known(self, num_seqs: int) -> bool:
        """Return whether enough steps without draft tokens were seen."""
        return self._pace(num_seqs, has_drafts=False).count >= _LEAST_STEPS

    def gain(self, num_seqs: int) -> float:
        """Return how many times the tokens a second steps with draft tokens sample. Returns infinity as long as that is not
        known."""
        before, now = self._pace(num_seqs, has_drafts=False), self._pace(num_seqs, has_drafts=True)
        if before.count < _LEAST_STEPS or now.count < 2 * _LEAST_STEPS:
            return inf
        return now.sampled / now.took_s * before.took_s / before.sampled

    def _pace(self, num_seqs: int, *, has_drafts: bool) -> _Pace:
        return self._paces.get((_size(num_seqs), has_drafts)) or _Pace()


def _size(num_seqs: int) -> int:
    return int(2 * log2(num_seqs))
