"""Which decode instance keeps the copies of which other one.

The instances form a ring in the order of their addresses, so that all schedulers see the same one. The buddy of an instance is
the next on another host, or else the next that is not on its card, with which it would be lost."""

from collections.abc import Sequence

from cluster.scheduler.fleet.link_model import Nearness, nearness
from cluster.scheduler.fleet.member import Member

_MAX_REMEMBERED = 4096


class Buddies:
    def __init__(self) -> None:
        self._of: dict[str, str] = {}

    def replica_of(self, lost: Sequence[str]) -> str:
        """Return the instance that has the copies of the one that was lost last, as far as is known; empty where there is
        none."""
        return next((self._of[address] for address in reversed(lost) if self._of.get(address)), "")

    def forget(self, address: str) -> None:
        """Forget the buddy of an instance that has (re)registered, since it knows of none."""
        self._of.pop(address, None)

    def pair(self, members: Sequence[Member]) -> list[tuple[str, str]]:
        """Pair the instances, and return the new pairs: (instance, its buddy or nothing). The buddies of lost instances are
        remembered for a while."""
        able = [m for m in members if m.info.decodes and m.info.replicates and not m.leaving]
        ring = sorted(able, key=lambda member: member.address)
        news: list[tuple[str, str]] = []
        for index, member in enumerate(ring):
            buddy = _next(ring, index)
            if self._of.get(member.address) != buddy:
                self._of[member.address] = buddy
                news.append((member.address, buddy))
        while len(self._of) > _MAX_REMEMBERED:
            del self._of[next(iter(self._of))]
        return news


def _next(ring: Sequence[Member], index: int) -> str:
    """Return the next after `index` on another host, or else on another card; empty where there is none."""
    own = ring[index].spot
    others = [ring[(index + step) % len(ring)] for step in range(1, len(ring))]
    far = (other for other in others if other.spot.host != own.host)
    apart = (other for other in others if nearness(own, other.spot) is not Nearness.CARD)
    found = next(far, None) or next(apart, None)
    return found.address if found else ""
