"""What is late leaves half of each instance to those that can still be in time.

A sequence keeps its place for as long as it decodes. A late one that fills an instance takes the place of one that comes in that
time, which is late in turn. So after there was too much for a while, nearly all would go on being late for as long as there is
nearly enough to do. Where requests come that can be in time, a late one is placed only on an instance that is at most half full:
of slots, of blocks, and of the step that its targets allow."""

from math import inf

from cluster.scheduler.fleet.member import Member
from cluster.scheduler.queue.waiting_queue import Waiter
from core.scheduler_tuning import DEFAULT_TUNING, SchedulerTuning


class LateHeadroom:
    def __init__(self, tuning: SchedulerTuning = DEFAULT_TUNING) -> None:
        self._tuning = tuning
        self._came_at: dict[int, float] = {}
        """Priority -> when a request of it with a target that it could keep last asked for a place."""

    def asked(self, waiter: Waiter, now: float) -> float:
        """Note that a request asks for a place, and return its `share`."""
        if not waiter.has_missed(now):
            if waiter.place.slo.is_timed:
                self._came_at[waiter.place.slo.priority] = now
            return 0.0
        return self.share(waiter, now)

    def share(self, waiter: Waiter, now: float) -> float:
        """Return which share of an instance it leaves to those of its class and of higher ones: none unless it is late. One whose
        tenant is behind leaves none either: it would wait for those of others."""
        if waiter.is_behind or not waiter.has_missed(now):
            return 0.0
        priority = waiter.place.slo.priority
        last = max((at for other, at in self._came_at.items() if other >= priority), default=-inf)
        return self._tuning.late_share if now - last <= self._tuning.late_come_s else 0.0


def leaves_room(member: Member, share: float) -> bool:
    """Return whether such a share of its slots and blocks is free."""
    if not share:
        return True
    slots, blocks = member.max_num_seqs, member.num_blocks
    return slots - member.num_seqs > share * slots and member.room_blocks > share * blocks
