"""Lets sequences that are ahead of their pace sit out while others have their blocks (`core.pacing.overcommit`). Owned by
StepScheduler.

Only those lend whose KV lower tiers keep, so that they need not be computed again."""

from core.pacing.overcommit import COUNTS_S, ahead_s, lenders
from engine.planning.lifecycle import Lifecycle
from engine.planning.returning import Returning
from engine.planning.sequence import Sequence, State

_UNSAVED_BLOCKS = 2
"""The last block is not full, and the one before it may not have been offered yet."""


class Lending:
    def __init__(self, lifecycle: Lifecycle, returning: Returning, longest_pause_s: float) -> None:
        self._table, self._ledger, self._returning = lifecycle.table, lifecycle.ledger, returning
        self._longest_pause_s = longest_pause_s

    def lenders(self, priority: int, now: float) -> list[Sequence]:
        """Return the running sequences that may lend to a class of that priority, what is furthest ahead first."""
        return lenders(self._able(), priority, now)

    def lendable_blocks(self, now: float) -> int:
        """Return the blocks of sequences that are so far ahead that the scheduler may count on them."""
        return sum(len(seq.block_ids) for seq in self._able() if ahead_s(seq, now) > COUNTS_S)

    def lends(self, seq: Sequence, now: float) -> None:
        """Note that a sequence, which is preempted next, lends its blocks from now on."""
        seq.rests_until_s = now + self._longest_pause_s

    def _able(self) -> list[Sequence]:
        if not self._longest_pause_s or self._ledger.num_state_blocks:
            return []
        return [seq for seq in self._table.running if self._is_able(seq)]

    def _is_able(self, seq: Sequence) -> bool:
        """Return whether all that is computed of a sequence but its last blocks is kept below."""
        num_unsaved = len(seq.tokens) - seq.num_kept * self._ledger.block_size
        return (
            seq.state is State.RUNNING
            and seq.push is None
            and seq.num_missing <= 1
            and num_unsaved <= _UNSAVED_BLOCKS * self._ledger.block_size
            and self._returning.may_return(seq)
        )
