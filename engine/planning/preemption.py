"""Takes slots and blocks from running sequences, which wait and are computed again, or read back from lower tiers. Owned by
StepScheduler.

Those that are ahead of their pace pause theirs (`core.pacing.overcommit`) where lower tiers keep their KV, so that it need not be
computed again."""

from core.pacing.giving_way import giving_way
from core.pacing.overcommit import ahead_s, pausable
from core.ports import SchedulerPolicy
from core.types import Request
from engine.planning.lifecycle import Lifecycle
from engine.planning.sequence import Sequence, State
from engine.planning.step_limits import StepLimits

_UNSAVED_BLOCKS = 2
"""The last block is not full, and the one before it may not have been offered yet."""


class Preemption:
    def __init__(
        self,
        limits: StepLimits,
        policy: SchedulerPolicy[Sequence],
        lifecycle: Lifecycle,
        longest_pause_s: float,
    ) -> None:
        self._limits, self._policy, self.lifecycle = limits, policy, lifecycle
        self._table, self._ledger = lifecycle.table, lifecycle.ledger
        self._longest_pause_s = longest_pause_s

    def free_slots(self, now: float) -> None:
        """Preempt sequences of lower classes where those of higher ones wait and have no slot."""
        num_free = self._limits.num_seqs - self._table.num_placed
        if self._table.num_priorities <= 1 or num_free >= len(self._table.waiting):
            return
        for seq in [*self._policy.order(self._table.waiting, now)][max(0, num_free) :]:
            victims = self._table.below(seq.request.slo.priority)
            if not victims:
                return
            self.lifecycle.preempt(self._policy.victim(victims))

    def fit_slots(self) -> None:
        """Preempt sequences, those of the lowest priority first, until no more run than there are slots. Pushed ones stay."""
        victims = [seq for seq in self._table.running if seq.push is None]
        while victims and len(self._table.running) > self._limits.num_seqs:
            victim = self._policy.victim(victims)
            victims.remove(victim)
            self.lifecycle.preempt(victim)

    def make_room(self, request: Request, num_tokens: int, now: float) -> bool:
        """Preempt sequences of lower classes, and then such as are ahead of their pace, until `request` finds blocks here for so
        many tokens. Returns False, having preempted none, if that does not suffice.

        Blocks that a step in flight writes come free when it is committed. Until then nothing more is taken. Sequences that
        return give no blocks back, so there is nothing to wait for."""
        if self._are_coming:
            return False
        priority = request.slo.priority
        below = self._table.below(priority)
        short = self._ledger.num_needed(num_tokens) + self._table.headroom - self._ledger.num_available
        victims = giving_way(self._policy, below, self._pausable(priority, now), short)
        for victim in victims or ():
            if victim not in below:
                self.pauses(victim, now)
            self.lifecycle.preempt(victim)
        return victims is not None

    def grow(self, seq: Sequence, count: int, now: float) -> bool:
        """Give a running sequence more blocks, taken from a victim when none are left. Returns False when it gets none now: it
        waits for those of a victim that a step in flight writes."""
        while self._ledger.num_available < count:
            if self._are_coming:
                return False
            victim = self._victim(seq, now)
            if victim is None:
                return False
            self.lifecycle.preempt(victim)
            if victim is seq or victim.num_in_flight:
                return False
        self._ledger.grow(seq, count)
        return True

    def pauses(self, seq: Sequence, now: float) -> None:
        """Note that a sequence, which is preempted next, pauses and gives up its blocks from now on."""
        seq.rests_until = now + self._longest_pause_s

    def pausable_blocks(self, now: float) -> int:
        """Return the blocks of sequences that are so far ahead that the scheduler may count on them."""
        counts_s = self._policy.tuning.counts_s
        return sum(len(seq.block_ids) for seq in self._able_to_lend() if ahead_s(seq, now) > counts_s)

    @property
    def _are_coming(self) -> bool:
        """Whether blocks come free when a step in flight is committed."""
        return any(seq.state is State.PREEMPTED for seq in self._table.all.values())

    def _victim(self, seq: Sequence, now: float) -> Sequence | None:
        """Return who gives way to a running sequence, maybe itself: what is furthest ahead of its pace pauses, else the policy
        says it."""
        if ahead := self._pausable(seq.request.slo.priority, now):
            self.pauses(ahead[0], now)
            return ahead[0]
        victims = [s for s in self._table.running if s.push is None and s.state is State.RUNNING]
        return self._policy.victim(victims) if victims else None

    def _pausable(self, priority: int, now: float) -> list[Sequence]:
        """Return the running sequences that may pause to a class of that priority, what is furthest ahead first."""
        return pausable(self._able_to_lend(), priority, now, self._policy.tuning)

    def _able_to_lend(self) -> list[Sequence]:
        if not self._longest_pause_s or self._ledger.num_state_blocks:
            return []
        return [seq for seq in self._table.running if self._is_kept_below(seq)]

    def _is_kept_below(self, seq: Sequence) -> bool:
        """Return whether all that is computed of a sequence that decodes, but for its last blocks, is kept below."""
        num_unsaved = len(seq.tokens) - seq.num_kept * self._ledger.block_size
        return (
            seq.state is State.RUNNING
            and seq.push is None
            and seq.num_missing <= 1
            and num_unsaved <= _UNSAVED_BLOCKS * self._ledger.block_size
            and self.lifecycle.prefixes.may_return(seq)
        )
