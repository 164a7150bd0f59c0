"""Begins sequences that wait: they run, or their KV is read back from lower tiers first. Owned by StepScheduler.

A preempted sequence is RETURNING while its KV is read into the prefix cache. Then it waits as others do, and what it finds there
is not computed again."""

from collections.abc import Sequence as SeqOf

from core.pacing.overcommit import rests
from core.pacing.slots import has_slot
from core.ports import SchedulerPolicy
from engine.cache.radix_cache import PrefixMatch
from engine.planning.preemption import Preemption
from engine.planning.sequence import Sequence, State
from engine.planning.step_builder import StepBuilder
from engine.planning.step_limits import StepLimits


class StepAdmission:
    def __init__(self, limits: StepLimits, policy: SchedulerPolicy[Sequence], preemption: Preemption) -> None:
        self._limits, self._policy, self._preemption = limits, policy, preemption
        self._lifecycle = lifecycle = preemption.lifecycle
        self._table, self._ledger, self._prefixes = lifecycle.table, lifecycle.ledger, lifecycle.prefixes
        self.num_returned = 0
        """The number of preempted sequences so far whose KV was read back."""

    def in_order(self, now: float) -> SeqOf[Sequence]:
        """Return the sequences that wait. Those that have paused and need not be back yet come last: they take what
        others leave."""
        waiting = self._policy.order(self._table.waiting, now)
        return sorted(waiting, key=lambda seq: self._rests(seq, now))

    def _rests(self, seq: Sequence, now: float) -> bool:
        return rests(seq, seq.rests_until, now, self._policy.tuning)

    def begin(self, seq: Sequence, builder: StepBuilder) -> bool:
        """Begin a sequence. Returns False where it must wait for a slot or for blocks, as must all that come after it."""
        if not has_slot(seq, self._table.num_placed, self._limits.num_seqs):
            return False
        match = self._find(seq, builder)
        if self._has_room(seq, match, builder):
            return True
        if self._table.running and self._rests(seq, builder.now):
            return False
        made_room = self._preemption.make_room(seq.request, len(seq.tokens) + 1, builder.now)
        # A copy has its source beside it. A request that is alone may need those blocks.
        match = PrefixMatch(blocks=() if match.state else match.blocks)
        return (made_room or not self._table.running) and self._has_room(seq, match, builder)

    def _has_room(self, seq: Sequence, match: PrefixMatch, builder: StepBuilder) -> bool:
        """Let a sequence run, or have its KV read first where lower tiers have more of it. Returns False where there is no room
        for either."""
        if self._is_read_back(seq, match):
            return True
        if not self._ledger.admit(seq, match, len(seq.tokens), self._table.headroom):
            return False
        builder.copies += self._ledger.copies(seq, match, builder.step)
        self._table.waiting.remove(seq)
        self._lifecycle.run(seq)
        return True

    def _find(self, seq: Sequence, builder: StepBuilder) -> PrefixMatch:
        """What is here of its KV: in the prefix cache, and in the blocks of its sibling."""
        match = self._ledger.find(seq.request, seq.tokens, partial=True)
        sibling = self._table.all.get(seq.request.sibling)
        if sibling is None or sibling.state is not State.RUNNING:
            return match
        num_computed = builder.num_computed_before(sibling.key, sibling.num_computed)
        return self._ledger.find_at(sibling, num_computed, seq, match)

    def _is_read_back(self, seq: Sequence, match: PrefixMatch) -> bool:
        """Have the KV of a sequence read, where it has lost its blocks, there is room for all of it, and lower tiers have more of
        it than `match`. They are asked once each time that it is preempted."""
        if not seq.is_lost or not self._prefixes.may_return(seq):
            return False
        # A state that is read back is a checkpoint, and is copied for the sequence.
        spare = self._table.headroom + self._ledger.num_state_blocks
        if not self._ledger.has_room(match, len(seq.tokens), spare):
            return False
        seq.is_lost = False
        num_full = self._prefixes.read(
            self._prefixes, seq.with_output, lambda found: self._has_come(seq, found)
        )
        if not num_full:
            return False
        self._lifecycle.await_kv(seq, len(seq.tokens) - num_full * self._ledger.block_size)
        return True

    def _has_come(self, seq: Sequence, found: bool) -> None:  # noqa: FBT001 (readers call it)
        self.num_returned += found and seq.state is State.RETURNING
        self._lifecycle.has_kv(seq)
