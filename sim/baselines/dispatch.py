"""A scheduler that places each request as it comes, by the `Router` it is given. There is no queue in front of the instances.

It keeps the same books as the production one (cluster.scheduler.fleet.member.Member: reports, and what was reserved since;
cluster.scheduler.fleet.prefix_index), so a router sees what it would see in production, as late as it would."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from cluster.scheduler.fleet.member import Member
from cluster.scheduler.fleet.prefix_index import PrefixIndex
from cluster.scheduler.fleet.reservation import PlacementReservation
from cluster.scheduler.placement.placement_policy import PlacementChoice, PlacementQuery
from cluster.scheduler.scheduler_events import Event, RequestArrived, Send
from core.config.cluster_config import ScheduleConfig
from core.kv import num_blocks_for
from core.messages import Finished, PlaceReply, PlaceRequest, Rejected
from core.reports import LoadReport, Register
from core.types import Route, Slo
from sim.coarse.world import Log


@dataclass(frozen=True, slots=True)
class Offer:
    """A request as a router sees it."""

    ask: PlacementQuery
    slo: Slo
    hashes: tuple[int, ...]
    """Hashes of its prompt's full blocks."""


class Router(Protocol):
    def choose(self, offer: Offer, members: Sequence[Member], now: float) -> PlacementChoice | None:
        """Return where it runs; None refuses it."""
        ...


def prefills(members: Sequence[Member]) -> list[Member]:
    """Return the instances of a prefill pool. Where any instance does either role there is none: each computes its own."""
    return [m for m in members if m.info.prefills and not m.info.decodes]


def decodes(members: Sequence[Member]) -> list[Member]:
    return [m for m in members if m.info.decodes]


class Dispatcher:
    """sim.coarse.world.Scheduler."""

    def __init__(self, config: ScheduleConfig, log: Log, router: Router) -> None:
        self._router, self._log = router, log
        self._settle_s = 2 * config.report_interval_s + 0.2
        self._members: dict[str, Member] = {}
        self._prefixes = PrefixIndex()
        self._routes: dict[str, Route] = {}

    @property
    def num_queued(self) -> int:
        return 0

    def on(self, event: Event, now: float) -> list[Send]:
        match event:
            case RequestArrived(frontend, place):
                return [Send(frontend, self._place(place, now))]
            case Register():
                self._members[event.address] = Member(event)
            case LoadReport(address=address):
                self._members[address].report(event, now - self._settle_s)
                self._prefixes.update(address, event.cache_added, event.cache_removed)
            case Finished(request_id):
                route = self._routes.pop(request_id)
                for address in filter(None, (route.decode, route.prefill)):
                    self._members[address].release(request_id)
            case _:
                pass
        return []

    def _place(self, place: PlaceRequest, now: float) -> PlaceReply | Rejected:
        ask = PlacementQuery(place.num_tokens, self._prefixes.match(place.block_hashes))
        choice = self._router.choose(
            Offer(ask, place.slo, place.block_hashes), [*self._members.values()], now
        )
        if choice is None:
            self._log(f"reject {place.request_id}")
            return Rejected(place.request_id, 0, "predicted to miss its targets", 1.0)
        decode, prefill = choice.decode, choice.prefill
        if prefill is decode:
            prefill = None
        num_blocks = num_blocks_for(place.num_tokens, decode.info.block_size)
        here = ask.uncached(decode) if prefill is None else 0
        decode.reserve(
            place.request_id, PlacementReservation(now, 1, num_blocks, here, hashes=place.block_hashes)
        )
        if prefill is not None:
            prefill.reserve(
                place.request_id, PlacementReservation(now, 0, 0, ask.uncached(prefill), hashes=())
            )
        route = Route(decode.address, prefill.address if prefill is not None else "")
        self._routes[place.request_id] = route
        self._log(f"place {place.request_id} {route.prefill or 'local'} {route.decode}")
        return PlaceReply(place.request_id, 0, route)
