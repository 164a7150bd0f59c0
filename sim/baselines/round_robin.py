"""Round robin over the prefill pool and over the decode pool, as a load balancer without any knowledge does it."""

from collections.abc import Sequence
from itertools import count

from cluster.scheduler.fleet.member import Member
from cluster.scheduler.placement.placement_policy import PlacementChoice
from sim.baselines.dispatch import Offer, decodes, prefills


class RoundRobin:
    def __init__(self) -> None:
        self._turns = count()

    def choose(self, offer: Offer, members: Sequence[Member], now: float) -> PlacementChoice | None:
        turn, sources, sinks = next(self._turns), prefills(members), decodes(members)
        return PlacementChoice(
            sinks[turn % len(sinks)], sources[turn % len(sources)] if sources else None, 0.0
        )
