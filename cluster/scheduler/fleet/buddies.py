"""Which decode instance keeps the copies of which.

The instances form a ring in the order of their addresses, so that all schedulers see the same one; each one's buddy is the next
on another host, or else the next."""

from collections.abc import Sequence

from cluster.scheduler.fleet.member import Member

_MAX_REMEMBERED = 4096


class Buddies:
    def __init__(self) -> None:
        self._of: dict[str, str] = {}

    def replica_of(self, lost: Sequence[str]) -> str:
        """Who has the copies of the instance that was lost last, as far as is known; empty: nobody."""
        return next((self._of[address] for address in reversed(lost) if self._of.get(address)), "")

    def forget(self, address: str) -> None:
        """It has (re)registered and knows of no buddy."""
        self._of.pop(address, None)

    def pair(self, members: Sequence[Member]) -> list[tuple[str, str]]:
        """Newly paired: (instance, its buddy or nothing). Those that are gone keep their heirs for a while."""
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
    """The next after `index` on another host, or else the next; empty: it is alone."""
    for step in range(1, len(ring)):
        other = ring[(index + step) % len(ring)]
        if other.spot.host != ring[index].spot.host:
            return other.address
    return ring[(index + 1) % len(ring)].address if len(ring) > 1 else ""
