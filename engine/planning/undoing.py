"""Takes plans back that the ranks did not compute to their end. Owned by StepScheduler.

What a rank knows of their sequences is not asked: it is told to forget them, and is told of them anew, with the tokens that are
known. KV behind the computed tokens may have been written and is written again. What cannot be computed again behind what is
there, a recurrent state or what is wanted of each token of a prompt, is computed from the beginning."""

from dataclasses import dataclass

from core.plan import StepPlan
from engine.planning.lifecycle import Lifecycle
from engine.planning.sequence import Sequence, State


@dataclass(frozen=True, slots=True, kw_only=True)
class TakenBack:
    """What becomes of plans that were taken back."""

    goes_on: bool
    """Whether the next plan asks for less, or tries once more the least that a plan can ask for."""
    paused: list[str]
    """Pushed sequences. Steps compute them when nothing reads any more what they have written (`go_on`)."""
    lost: list[str]
    """Pushed sequences that cannot be computed again where they are."""


class Undoing:
    def __init__(self, lifecycle: Lifecycle) -> None:
        self._table, self._ledger, self._lifecycle = lifecycle.table, lifecycle.ledger, lifecycle

    def undo(self, plan: StepPlan) -> list[Sequence]:
        """Undo the last plan that is not committed. Returns its sequences, for `settle` when all such plans are undone."""
        seqs = [self._table.all[work.key] for work in plan.work]
        self._lifecycle.drop_again(plan.drop)
        for work, seq in zip(plan.work, seqs, strict=True):
            # A sample that was put off may have taken back more than this work.
            seq.num_computed = min(seq.num_computed, work.start)
            seq.num_in_flight -= 1
            seq.num_pending = 0  # what was sampled is known, and no step in flight samples more
            if work.push is not None:
                seq.num_pushed = work.push.start
            self._lifecycle.unannounce(seq)
        self._ledger.undone(plan, seqs)
        return seqs

    def settle(self, seqs: list[Sequence]) -> tuple[list[str], list[str]]:
        """Let the sequences of all undone plans go on, wait, or leave. Returns the keys of those that are paused, and of those
        that are lost (`TakenBack`)."""
        paused: list[str] = []
        lost: list[str] = []
        relying = self._ledger.relying(seqs)
        for seq in seqs:
            # One that was given blocks of its sibling, which an undone plan was to compute first, cannot go on without them.
            begins_anew = _begins_anew(seq) or seq in relying
            if seq.state is not State.RUNNING:
                self._lifecycle.settle(seq)
            elif seq.push is not None:
                self._lifecycle.pause(seq)
                (lost if begins_anew else paused).append(seq.key)
            elif begins_anew:
                self._lifecycle.preempt(seq)
        return paused, lost


def _begins_anew(seq: Sequence) -> bool:
    """Return whether what is computed of it is of no use when a step has written behind it, or has been forgotten."""
    has_lost_outputs = not seq.request.reuses_prefix and seq.num_output == 0
    return seq.num_computed > 0 and (seq.state_tokens > 0 or has_lost_outputs)
