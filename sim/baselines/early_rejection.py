"""Early rejection (Mooncake, FAST '25) in front of any router.

A request that is predicted to miss its time to the first token or its time per token where the router sends it is refused before
anything is computed for it."""

from collections.abc import Sequence

from cluster.scheduler.fleet.member import Member
from cluster.scheduler.placement.placement_policy import PlacementChoice
from sim.baselines.dispatch import Offer, Router
from sim.baselines.predict import tpot_s, ttft_s


class EarlyRejection:
    def __init__(self, router: Router) -> None:
        self._router = router

    def choose(self, offer: Offer, members: Sequence[Member], now: float) -> PlacementChoice | None:
        choice = self._router.choose(offer, members, now)
        if choice is None:
            return None
        misses = ttft_s(choice.computes, offer.ask) > offer.slo.ttft_s
        return None if misses or tpot_s(choice.decode, offer.ask) > offer.slo.tpot_s else choice
