"""Keeps what is late from places that those lack who can be in time.

A sequence keeps its place for as long as it decodes. So a late one takes it from those that come in that time. Where none of them
has lacked a place for so long, it costs them nothing."""

from collections.abc import Sequence
from math import inf
from typing import Final

from cluster.scheduler.fleet.member import Member
from cluster.scheduler.queue.waiting_queue import Waiter

_MOST_S: Final = 30.0
"""What is late is kept back for no longer after the last lack, however long sequences decode."""


class Scarcity:
    def __init__(self) -> None:
        self._lacked_at: dict[int, float] = {}
        """Level -> when a request that could be in time found no place."""

    def keeps_back(self, waiter: Waiter, usable: Sequence[Member], now: float, *, found: bool) -> bool:
        """Return whether a request is too late to be placed while those of its level or a higher one lack places. `found` says
        whether there is a place for it, among the instances that are `usable`."""
        level = waiter.place.slo.priority
        if now + waiter.work_s <= waiter.due_at:
            if not found:
                self._lacked_at[level] = now
            return False
        lives_s = usable[0].lives_s if usable else inf
        since = max((at for lacking, at in self._lacked_at.items() if lacking >= level), default=-inf)
        return lives_s < inf and now - since < min(lives_s, _MOST_S)
