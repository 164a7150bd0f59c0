"""The living instances, what they cache, and which of them could take a request at all. Owned by the GlobalScheduler. Pure."""

from collections.abc import Mapping, Sequence
from itertools import islice

from cluster.buddies import Buddies
from cluster.events import Send
from cluster.fleet import Member
from cluster.prefix_index import PrefixIndex
from core.messages import Buddy, LoadReport, Place, Register

NO_DECODE = "no decode instance is alive"
FETCH_TOKENS = 128
"""A cached prefix as long as this is worth asking a decode instance for."""


class Roster:
    def __init__(self) -> None:
        self._members: dict[str, Member] = {}
        self._prefixes = PrefixIndex()
        self._buddies = Buddies()
        self.largest_tokens = 0
        """What the largest decode instance that was ever seen holds."""

    @property
    def members(self) -> tuple[Member, ...]:
        """In order of registration."""
        return tuple(self._members.values())

    def some(self, count: int) -> list[Member]:
        return list(islice(self._members.values(), count))

    def get(self, address: str) -> Member | None:
        return self._members.get(address)

    def why_not(self) -> str:
        """Why nothing can be placed, whatever the load; empty: something can."""
        return "" if any(m.info.decodes and not m.leaving for m in self._members.values()) else NO_DECODE

    # Facts ----------------------------------------------------------------------------------------------------------
    def knows(self, info: Register) -> bool:
        known = self._members.get(info.address)
        return known is not None and known.info == info

    def add(self, info: Register) -> None:
        """A new instance, which knows of no buddy."""
        self._members[info.address] = Member(info)
        if info.decodes:
            self.largest_tokens = max(self.largest_tokens, info.num_blocks * info.block_size)

    def remove(self, address: str) -> None:
        if self._members.pop(address, None) is not None:
            self._prefixes.drop(address)

    def leave(self, address: str) -> None:
        if (member := self._members.get(address)) is not None:
            member.leaving = True

    def report(self, report: LoadReport, settled_before_s: float) -> Member | None:
        if (member := self._members.get(report.address)) is None:
            return None
        member.report(report, settled_before_s)
        self._prefixes.update(report.address, report.cache_added, report.cache_removed)
        return member

    def forget_buddy(self, address: str) -> None:
        self._buddies.forget(address)

    def pair(self) -> list[Send]:
        """Tell those whose buddy has changed."""
        return [Send(a, Buddy(buddy)) for a, buddy in self._buddies.pair(list(self._members.values()))]

    # Who could take a request ---------------------------------------------------------------------------------------
    def hits(self, place: Place) -> dict[str, int]:
        """For each address: how many leading blocks of the prompt are cached there."""
        return self._prefixes.runs(place.block_hashes)

    def heir(self, lost: Sequence[str]) -> str:
        """Who has copies of the KV of the instance that was lost last; empty: nobody."""
        return self._buddies.heir(lost)

    def any_headroom(self) -> bool:
        return any(
            m.info.decodes and m.num_seqs < m.info.max_num_seqs and m.free_blocks > 0
            for m in self._members.values()
        )

    def decodes(self, place: Place) -> list[Member]:
        """Those that could hold prompt and output to the end."""
        total = place.num_tokens + place.max_new_tokens
        able = [
            m
            for m in self._members.values()
            if m.info.decodes and not m.leaving and m.capacity_tokens >= total
        ]
        return _without(able, place.exclude)

    def prefills(self, place: Place, exclude: Sequence[str]) -> list[Member]:
        able = [
            m
            for m in self._members.values()
            if m.info.prefills and not m.leaving and m.capacity_tokens > place.num_tokens
        ]
        return _without(able, exclude)

    def holders(self, place: Place, hits: Mapping[str, int], exclude: Sequence[str]) -> list[Member]:
        """Decode instances that have so much of the prompt cached that it may be fetched from there."""
        found = (self._members.get(address) for address in hits)
        return [
            m
            for m in found
            if m is not None
            and m.info.decodes
            and m.info.sends
            and not m.info.prefills
            and not m.leaving
            and m.address not in exclude
            and m.capacity_tokens > place.num_tokens
            and hits[m.address] * m.info.block_size >= FETCH_TOKENS
        ]


def _without(members: list[Member], exclude: Sequence[str]) -> list[Member]:
    """The members that are not excluded, or all where that leaves none."""
    return [m for m in members if m.address not in exclude] or members
