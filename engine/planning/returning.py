"""Lets preempted sequences come back with the KV that lower tiers have of them. Owned by StepScheduler.

Such a sequence is RETURNING while its KV is read into the prefix cache. Then it waits as others do, and what it finds there is
not computed again."""

from dataclasses import replace

from core.types import Request
from engine.cache.radix_cache import PrefixMatch
from engine.planning.lifecycle import Lifecycle
from engine.planning.prefixes import Prefixes
from engine.planning.sequence import Sequence, State


class Returning:
    def __init__(self, prefixes: Prefixes, lifecycle: Lifecycle) -> None:
        self._prefixes, self._lifecycle = prefixes, lifecycle
        self._table, self._ledger = lifecycle.table, lifecycle.ledger
        lifecycle.on_lost = self._has_lost
        self.num_returned = 0
        """The number of preempted sequences so far whose KV was read back."""

    def _has_lost(self, seq: Sequence) -> None:
        """A preempted sequence is about to lose its blocks."""
        if self._prefixes.read_back is not None:
            seq.num_below = seq.num_kept * self._ledger.block_size
        if self._prefixes.keep is not None and self.may_return(seq):
            self._prefixes.keep(_request(seq), self._ledger.kept(seq))

    def may_return(self, seq: Sequence) -> bool:
        """Return whether the sequence, if it is preempted, may find its KV below."""
        return self._prefixes.read_back is not None and (seq.request.reuses_prefix or seq.num_output > 0)

    def begin(self, seq: Sequence, match: PrefixMatch) -> bool:
        """Have the KV of a waiting sequence read, where it has lost its blocks, there is room for all of it, and lower tiers have
        more of it than `match`. They are asked once each time that it is preempted."""
        if not seq.is_lost or not self.may_return(seq):
            return False
        # A state that is read back is a checkpoint, and is copied for the sequence.
        spare = self._table.headroom + self._ledger.num_state_blocks
        if not self._ledger.has_room(match, len(seq.tokens), spare):
            return False
        seq.is_lost = False
        num_full = self._prefixes.read(
            self._prefixes, _request(seq), lambda found: self._has_come(seq, found)
        )
        if not num_full:
            return False
        self._lifecycle.await_kv(seq, len(seq.tokens) - num_full * self._ledger.block_size)
        return True

    def _has_come(self, seq: Sequence, found: bool) -> None:  # noqa: FBT001 (readers call it)
        self.num_returned += found and seq.state is State.RETURNING
        self._lifecycle.has_kv(seq)


def _request(seq: Sequence) -> Request:
    """Return its request with all that was generated here."""
    return replace(seq.request, emitted=tuple(seq.tokens[seq.num_prompt :]))
