"""Lets preempted sequences come back with the KV that lower tiers have of them. Owned by StepScheduler.

Such a sequence is RETURNING while its KV is read into the prefix cache. Then it waits as others do, and what it finds there is
not computed again."""

from collections.abc import Callable
from collections.abc import Sequence as SeqOf
from dataclasses import replace
from typing import Protocol

from core.types import Request
from engine.cache.radix_cache import PrefixMatch
from engine.planning.block_ledger import BlockLedger, CachedPrefix, Restore
from engine.planning.lifecycle import Lifecycle
from engine.planning.sequence import Sequence, State
from engine.planning.sequence_table import SequenceTable


class PrefixPlace(Protocol):
    """A pool of blocks with its prefix cache: an instance's, or that of one of its groups of ranks."""

    def cached_prefix(self, request: Request) -> CachedPrefix: ...
    def begin_restore(self, request: Request, num_full: int) -> Restore | None: ...


ReadBack = Callable[[PrefixPlace, Request, Callable[[bool], None]], int]
"""Begins to read into a place what lower tiers have of a request's prefix beyond its cache. Returns how many of the first blocks
are to be there then; 0: nothing is read. Otherwise the third argument is called later, with whether anything of use has come."""


Keep = Callable[[Request, SeqOf[int]], None]
"""Has lower tiers keep these blocks, which have the KV of a request's first tokens and may be overwritten then."""


class Returning:
    def __init__(
        self, place: PrefixPlace, table: SequenceTable, ledger: BlockLedger, lifecycle: Lifecycle
    ) -> None:
        """`place` is where the sequences are."""
        self._place, self._table, self._ledger, self._lifecycle = place, table, ledger, lifecycle
        self._read: ReadBack | None = None
        self._keep: Keep | None = None
        self.num_returned = 0
        """The number of preempted sequences so far whose KV was read back."""

    @property
    def reads(self) -> bool:
        """Whether there are lower tiers."""
        return self._read is not None

    def use(self, read: ReadBack, keep: Keep | None) -> None:
        """Have `keep` keep the blocks of sequences that lose them, and `read` read them back. Without `keep` tiers are taken to
        have them."""
        self._read, self._keep, self._table.reads_back = read, keep, True
        self._lifecycle.on_lost = self._has_lost

    def read(self, place: PrefixPlace, request: Request, then: Callable[[bool], None]) -> int:
        """As a ReadBack. Without lower tiers there is nothing to read."""
        return self._read(place, request, then) if self._read is not None else 0

    def _has_lost(self, seq: Sequence) -> None:
        """A preempted sequence is about to lose its blocks."""
        if self._keep is not None and self.may_return(seq):
            self._keep(_request(seq), self._ledger.kept(seq))

    def may_return(self, seq: Sequence) -> bool:
        """Return whether the sequence, if it is preempted, may find its KV below."""
        return self._read is not None and (seq.request.reuses_prefix or seq.num_output > 0)

    def begin(self, seq: Sequence, match: PrefixMatch) -> bool:
        """Have the KV of a waiting sequence read, where it has lost its blocks, there is room for all of it, and lower tiers have
        more of it than `match`. They are asked once each time that it is preempted."""
        if self._read is None or not seq.is_lost or not self.may_return(seq):
            return False
        # A state that is read back is a checkpoint, and is copied for the sequence.
        spare = self._table.headroom + self._ledger.num_state_blocks
        if not self._ledger.has_room(match, len(seq.tokens), spare):
            return False
        seq.is_lost = False
        num_full = self._read(self._place, _request(seq), lambda found: self._has_come(seq, found))
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
