"""How long a draft model takes for one more draft token of every sequence, learned from the steps before which it has made
some."""

from math import log2

from core.plan import PROPOSED, StepPlan, StepResult

_WEIGHT = 1 / 8
"""What the newest step counts."""
_FURTHEST = 2.0
"""A time that is off by more than this factor was disturbed. It teaches no more than this."""


class ProposalPace:
    def __init__(self) -> None:
        self._each_s: dict[int, float] = {}
        """By the size of the batch."""

    def observe(self, plan: StepPlan, result: StepResult) -> None:
        """Learn from a step, unless the rank has made fewer draft tokens than it was asked for, or read prompts first."""
        if not plan.size.num_drafts or not result.proposing_s:
            return
        asked = [len(work.drafts) for work in plan.work if work.drafts and work.drafts[0] == PROPOSED]
        if not asked or any(sampled.num_unmade for sampled in result.sampled):
            return
        size, each_s = _size(len(asked)), result.proposing_s / max(asked)
        if (before := self._each_s.get(size)) is not None:
            each_s = max(before / _FURTHEST, min(before * _FURTHEST, each_s))
            each_s = before + (each_s - before) * _WEIGHT
        self._each_s[size] = each_s

    def each_s(self, num_seqs: int) -> float:
        """Return the time of one more draft token of each of so many sequences; 0 as long as nothing is known of it."""
        if not self._each_s or not num_seqs:
            return 0.0
        return self._each_s[min(self._each_s, key=lambda size: abs(size - _size(num_seqs)))]


def _size(num_seqs: int) -> int:
    return int(2 * log2(num_seqs))
