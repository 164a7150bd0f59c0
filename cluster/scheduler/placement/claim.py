"""Keeps one decode instance at a time for a request that found no room. Owned by a Placer."""

from collections.abc import Callable, Sequence

from cluster.scheduler.fleet.member import Member
from cluster.scheduler.queue.waiting_queue import Waiter


class Claim:
    def __init__(self, log: Callable[[str], None]) -> None:
        self._log = log
        self.key = ""
        """The key of the request; empty while nothing is claimed."""
        self.address = ""
        """The address of the instance that is kept for it."""

    def ask(self, waiter: Waiter, usable: Sequence[Member], now: float) -> None:
        """Keep an instance for `waiter`, for which nothing has headroom, after a while."""
        if waiter.blocked_since is None:
            waiter.blocked_since = now
        if usable and not self.key and now - waiter.blocked_since >= waiter.claims_after_s:
            member = max(usable, key=lambda m: m.free_blocks)
            self.key, self.address = waiter.key, member.address
            self._log(f"claim {waiter.key} {member.address}")

    def end(self) -> None:
        """Keep nothing any more."""
        self.key = self.address = ""
