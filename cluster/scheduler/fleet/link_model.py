"""How fast KV may go from one instance to another, by where their hosts stand.

Load reports say how fast it goes once some has gone (`out_links`). Until then the scheduler assumes what this model says. Hosts
of which nothing is known count as near as those of one rack."""

from collections.abc import Iterable
from dataclasses import dataclass
from enum import IntEnum
from typing import Generic, TypeVar

from core.reports import Register

T = TypeVar("T")


class Nearness(IntEnum):
    """How near two instances are. A lower value is nearer."""

    CARD = 0
    HOST = 1
    NVLINK = 2
    RACK = 3
    ZONE = 4
    FAR = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkModel:
    same_card_bytes_per_s: float = 100e9
    """Assumed within the memory of one GPU. None has been measured."""
    same_host_bytes_per_s: float = 2.5e9
    other_host_bytes_per_s: float = 1.2e9
    """Assumed between hosts whose network cards are not known."""
    nic_share: float = 0.7
    """The share of a network card's rate that a KV transfer gets."""
    beyond_rack_share: float = 0.5
    beyond_zone_share: float = 0.1
    """The shares of a host's rate that are left beyond its rack, and beyond its zone, since networks narrow on the way up."""


class Spot:
    """Where an instance stands, as its registration says. Every pair of a decision is compared, so it is quick to read."""

    __slots__ = ("card", "domain", "groups", "host", "nic_bytes_per_s", "rack", "zone")

    def __init__(self, info: Register) -> None:
        site = info.site
        self.host, self.domain, self.zone, self.rack = info.host, site.nvlink_domain, site.zone, site.rack
        self.nic_bytes_per_s, self.card = site.nic_bytes_per_s, info.card
        groups: list[tuple[str, ...]] = [("card", info.card)] if info.card else []
        groups.append(("host", info.host))
        if site.nvlink_domain:
            groups.append(("nvlink", site.nvlink_domain))
        if site.rack:
            groups.append(("rack", site.zone, site.rack))
        self.groups = tuple(groups)
        """The groups of instances that stand near each other, smallest first."""


def nearness(one: Spot, other: Spot) -> Nearness:
    if one.card and one.card == other.card:
        return Nearness.CARD
    if one.host == other.host:
        return Nearness.HOST
    if one.domain and one.domain == other.domain:
        return Nearness.NVLINK
    if one.zone and other.zone and one.zone != other.zone:
        return Nearness.FAR
    if one.rack and other.rack and one.rack != other.rack:
        return Nearness.ZONE
    return Nearness.RACK


def locality(one: Spot, other: Spot) -> str:
    """Return the card or the host that `other` is on. How fast KV goes to one instance there is taken to hold for all of them."""
    return other.card if nearness(one, other) is Nearness.CARD else other.host


class Nearest(Generic[T]):
    """Answers which of some things, in order of preference, is the first of those nearest to an instance. Each thing stands with
    an instance. It is made once for many questions, since a large fleet has no time to scan all things for each."""

    def __init__(self, things: Iterable[tuple[Spot, T]]) -> None:
        self._by_card: dict[str, T] = {}
        self._by_host: dict[str, T] = {}
        self._by_domain: dict[str, T] = {}
        self._by_rack: dict[tuple[str, str], tuple[Spot, T]] = {}
        for spot, thing in things:
            if spot.card:
                self._by_card.setdefault(spot.card, thing)
            self._by_host.setdefault(spot.host, thing)
            if spot.domain:
                self._by_domain.setdefault(spot.domain, thing)
            self._by_rack.setdefault((spot.zone, spot.rack), (spot, thing))

    def to(self, spot: Spot) -> T:
        """Return the nearest thing. There must be one."""
        if spot.card in self._by_card:
            return self._by_card[spot.card]
        if spot.host in self._by_host:
            return self._by_host[spot.host]
        if spot.domain in self._by_domain:
            return self._by_domain[spot.domain]
        return min(self._by_rack.values(), key=lambda pair: nearness(pair[0], spot))[1]


def bytes_per_s(model: LinkModel, one: Spot, other: Spot) -> float:
    near = nearness(one, other)
    if near is Nearness.CARD:
        return model.same_card_bytes_per_s
    if near is Nearness.HOST:
        return model.same_host_bytes_per_s
    slower_nic = min(one.nic_bytes_per_s, other.nic_bytes_per_s)
    rate = slower_nic * model.nic_share or model.other_host_bytes_per_s
    if near is Nearness.FAR:
        return rate * model.beyond_zone_share
    return rate * model.beyond_rack_share if near is Nearness.ZONE else rate
