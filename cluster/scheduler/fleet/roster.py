"""The living instances, what they cache, and which of them could take a request at all. Owned by the GlobalScheduler."""

from collections.abc import Iterable, Sequence
from itertools import islice
from typing import Final

from cluster.scheduler.fleet.buddies import Buddies
from cluster.scheduler.fleet.link_model import locality
from cluster.scheduler.fleet.member import DEFAULT_TOKENS_PER_S, Member
from cluster.scheduler.fleet.prefix_index import PrefixHolders, PrefixIndex
from cluster.scheduler.fleet.reservation import Turnover
from cluster.scheduler.fleet.rng import RequestRng
from cluster.scheduler.fleet.shortlist import (
    NUM_CACHED,
    NUM_CACHED_DECODES,
    NUM_CACHED_SOURCES,
    NUM_NEAR,
    Shortlist,
)
from cluster.scheduler.scheduler_events import Send
from core.messages import Buddy, PlaceRequest
from core.reports import LoadReport, Register
from core.scheduler_tuning import DEFAULT_TUNING, SchedulerTuning

NO_DECODE: Final = "no decode instance is alive"
_MAX_CARDS: Final = 4096
SCAN_UP_TO: Final = 32
"""Up to so many instances, every one is considered for each request. In a larger fleet only a shortlist is."""


class Candidates:
    """What one attempt to place a request looks up once. `cached` are the instances that have most of the prompt cached, most
    first."""

    __slots__ = ("cached", "match", "rng")

    def __init__(self, match: PrefixHolders, cached: list[Member], rng: RequestRng) -> None:
        self.match, self.cached, self.rng = match, cached, rng


class Roster:
    def __init__(self, scan_up_to: int = SCAN_UP_TO, tuning: SchedulerTuning = DEFAULT_TUNING) -> None:
        self._fetch_tokens = tuning.fetch_tokens
        self._scan_up_to = scan_up_to
        self._members: dict[str, Member] = {}
        self._shortlist = Shortlist()
        self._rng = RequestRng("roster")
        self._last: tuple[PlaceRequest, int, Candidates] | None = None
        self._prefixes = PrefixIndex()
        self.turnover = Turnover(tuning)
        self._buddies = Buddies()
        self._cards: dict[str, str] = {}
        """Address -> the card that the instance shares or shared, also after its loss."""
        self._replicating: dict[str, Member] = {}
        self._decoding: dict[str, Member] = {}
        self.largest_tokens = 0
        """The longest sequence that the largest decode instance which was ever seen holds."""

    @property
    def members(self) -> tuple[Member, ...]:
        """The living instances, in order of registration."""
        return tuple(self._members.values())

    @property
    def num_decoding(self) -> int:
        """The number of living instances that decode."""
        return len(self._decoding)

    def some(self, count: int) -> list[Member]:
        return list(islice(self._members.values(), count))

    def get(self, address: str) -> Member | None:
        return self._members.get(address)

    def real(self, member: Member) -> Member:
        """Return the instance that `member` is, or is a reduced view of (`Member.above`)."""
        return self._members[member.address]

    def why_not(self) -> str:
        """Return why nothing can be placed, whatever the load; empty where something can."""
        return "" if any(m.decodes and not m.leaving for m in self._members.values()) else NO_DECODE

    def knows(self, info: Register) -> bool:
        known = self._members.get(info.address)
        return known is not None and known.info == info

    def add(self, info: Register) -> None:
        """Add a new instance, which knows of no buddy."""
        member = self._members[info.address] = Member(info, self._shortlist.changed, self.turnover)
        self._shortlist.changed[info.address] = member
        if info.card:
            self._cards[info.address] = info.card
            while len(self._cards) > _MAX_CARDS:
                del self._cards[next(iter(self._cards))]
        if info.decodes and info.replicates:
            self._replicating[info.address] = member
        if info.decodes:
            self._decoding[info.address] = member
            self.largest_tokens = max(self.largest_tokens, info.capacity_tokens)

    def remove(self, address: str) -> None:
        self._last = None
        if (member := self._members.pop(address, None)) is not None:
            self._prefixes.drop(address)
            self._shortlist.forget(member)
            self._replicating.pop(address, None)
            self._decoding.pop(address, None)

    def leave(self, address: str) -> None:
        if (member := self._members.get(address)) is not None:
            member.leave()

    def report(self, report: LoadReport, settled_before: float) -> Member | None:
        if (member := self._members.get(report.address)) is None:
            return None
        member.report(report, settled_before)
        if report.links or member.out_links.is_known:
            receivers = [self._members.get(link.receiver) for link in report.links]
            localities = [locality(member.spot, one.spot) if one else "" for one in receivers]
            member.out_links.hear(report.links, localities)
        self._last = None
        self._prefixes.update(member.address, report.cache_added, report.cache_removed)
        if not self.scans:
            self._settle()
        return member

    def forget_buddy(self, address: str) -> None:
        self._buddies.forget(address)

    def forget_buddies(self) -> None:
        """Forget all pairs, so that every instance is told its buddy anew."""
        for address in self._replicating:
            self._buddies.forget(address)

    def pair(self) -> list[Send]:
        """Return whom to tell of a new buddy."""
        return [Send(a, Buddy(buddy)) for a, buddy in self._buddies.pair(list(self._replicating.values()))]

    @property
    def scans(self) -> bool:
        """Whether the fleet is small enough that every instance is considered."""
        return len(self._members) <= self._scan_up_to

    def match(self, place: PlaceRequest) -> PrefixHolders:
        """Return how many leading blocks of the request's prompt are cached where."""
        return self._prefixes.match(place.block_hashes)

    def candidates(self, place: PlaceRequest, turn: int = 0) -> Candidates:
        """Return the candidates. Another `turn` draws others."""
        if self._last is not None and self._last[0] is place and self._last[1] == turn:
            return self._last[2]
        rng = RequestRng(place.request_id, turn)
        match = self.match(place)
        count = self._scan_up_to if self.scans else NUM_CACHED
        found = (self._members.get(address) for address in match.longest(count, rng))
        candidates = Candidates(match, [member for member in found if member is not None], rng)
        self._last = place, turn, candidates
        return candidates

    def replica_of(self, lost: Sequence[str]) -> str:
        """Return the instance that has copies of the KV of the one that was lost last; empty where there is none."""
        return self._buddies.replica_of(lost)

    def any_headroom(self, level: int) -> bool:
        """Return whether any instance may have blocks for a request of that level, to which lower ones give way."""
        if not self.scans:
            self._settle()
            return self._shortlist.any_headroom(level)
        return any(
            m.decodes and (m.lowest_level < level or m.free_blocks > 0) for m in self._members.values()
        )

    def any_slot(self, level: int) -> bool:
        """Return whether any of those has a slot as well."""
        if not self.scans:
            self._settle()
            return self._shortlist.any_slot(level)
        return any(
            m.decodes and (m.lowest_level < level or (m.has_slot and m.free_blocks > 0))
            for m in self._members.values()
        )

    def shortest_queues(self) -> Iterable[Member]:
        """Return the prefill instances with the shortest queues. If none of them has room for a prompt, no instance has."""
        if self.scans:
            return self._members.values()
        self._settle()
        least = self._shortlist.shortest_queue(self._rng)
        return () if least is None else (least,)

    def decodes(self, place: PlaceRequest, candidates: Candidates, wanted: str = "") -> list[Member]:
        """Return the instances that could hold prompt and output to the end. Of a large fleet these are the ones worth
        considering, and `wanted`."""
        total = place.num_tokens + place.max_new_tokens
        pool: Iterable[Member] = self._members.values()
        if not self.scans:
            self._settle()
            listed = self._shortlist.decodes(place.slo, candidates.cached[:NUM_NEAR], candidates.rng)
            named = [self._members[wanted]] if wanted in self._members else []
            cached = [m for m in candidates.cached if m.decodes][:NUM_CACHED_DECODES]
            pool = dict.fromkeys((*named, *cached, *listed))
        able = _could_decode(pool, total)
        if not able and not self.scans:
            able = _could_decode(self._members.values(), total)
        return self._without(able, place.exclude)

    def prefills(
        self, place: PlaceRequest, candidates: Candidates, decodes: Sequence[Member], exclude: Sequence[str]
    ) -> list[Member]:
        """Return the instances that could compute the prompt. Of a large fleet these are the ones worth considering for one of
        `decodes`."""
        pool: Iterable[Member] = self._members.values()
        if not self.scans:
            self._settle()
            cached = [m for m in candidates.cached if m.prefills][:NUM_CACHED_SOURCES]
            pool = dict.fromkeys(cached + self._shortlist.sources(decodes[:NUM_NEAR], candidates.rng))
        able = [m for m in pool if m.prefills and not m.leaving and m.capacity_tokens > place.num_tokens]
        return self._without(able, exclude)

    def answering(self, place: PlaceRequest, candidates: Candidates, wanted: str = "") -> list[Member]:
        """Return the instances that could compute its prompt and answer it at once, whether they decode or not."""
        alone = [
            m for m in self.prefills(place, candidates, (), place.exclude) if m.answers and not m.decodes
        ]
        return alone + self.decodes(place, candidates, wanted)

    def holders(self, place: PlaceRequest, candidates: Candidates, exclude: Sequence[str]) -> list[Member]:
        """Return the decode instances that have so much of the prompt cached that it may be fetched from there."""
        return [
            m
            for m in candidates.cached
            if m.decodes
            and m.sends
            and not m.prefills
            and not m.leaving
            and m.address not in exclude
            and m.capacity_tokens > place.num_tokens
            and candidates.match.get(m.address) * m.block_size >= self._fetch_tokens
        ]

    def _without(self, members: list[Member], exclude: Sequence[str]) -> list[Member]:
        """Return the members that are not excluded, and where possible on no card of those either: what ends one instance may end
        the other. Return all where nothing is left."""
        if not exclude:
            return members
        left = [m for m in members if m.address not in exclude]
        cards = [self._cards[address] for address in exclude if address in self._cards]
        return [m for m in left if m.spot.card not in cards] or left or members

    def _settle(self) -> None:
        self._shortlist.settle(DEFAULT_TOKENS_PER_S)


def _could_decode(pool: Iterable[Member], num_tokens: int) -> list[Member]:
    return [m for m in pool if m.decodes and not m.leaving and m.capacity_tokens >= num_tokens]
