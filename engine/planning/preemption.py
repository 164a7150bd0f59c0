"""Takes slots and blocks from running sequences, which wait and are computed again, or read back from lower tiers. Owned by
StepScheduler."""

from collections import deque

from core.ports import SchedulerPolicy
from core.types import Request
from engine.planning.block_lending import Lending
from engine.planning.lifecycle import Lifecycle
from engine.planning.sequence import Sequence, State
from engine.planning.step_limits import StepLimits


class Preemption:
    def __init__(
        self,
        limits: StepLimits,
        policy: SchedulerPolicy[Sequence],
        lifecycle: Lifecycle,
        lending: Lending,
    ) -> None:
        self._limits, self._policy, self.lifecycle, self._lending = limits, policy, lifecycle, lending
        self._table, self._ledger = lifecycle.table, lifecycle.ledger

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
        """Preempt sequences, those of the lowest precedence first, until no more run than there are slots. Pushed ones stay."""
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
        lower = set(below)
        ahead = deque(seq for seq in self._lending.lenders(priority, now) if seq not in lower)
        wanted = self._ledger.num_needed(num_tokens) + self._table.headroom
        coming = self._ledger.num_available
        if not (below or ahead) or coming + sum(len(seq.block_ids) for seq in (*below, *ahead)) < wanted:
            return False
        while coming < wanted and (below or ahead):
            if below:
                victim = self._policy.victim(below)
                below.remove(victim)
            else:
                victim = ahead.popleft()
                self._lending.lends(victim, now)
            coming += len(victim.block_ids)
            self.lifecycle.preempt(victim)
        return True

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

    @property
    def _are_coming(self) -> bool:
        """Whether blocks come free when a step in flight is committed."""
        return any(seq.state is State.PREEMPTED for seq in self._table.all.values())

    def _victim(self, seq: Sequence, now: float) -> Sequence | None:
        """Return who gives way to a running sequence, maybe itself: what is furthest ahead of its pace lends, else the policy
        says it."""
        if ahead := self._lending.lenders(seq.request.slo.priority, now):
            self._lending.lends(ahead[0], now)
            return ahead[0]
        victims = [s for s in self._table.running if s.push is None and s.state is State.RUNNING]
        return self._policy.victim(victims) if victims else None
