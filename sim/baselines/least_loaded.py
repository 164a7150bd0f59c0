"""Takes the least loaded instance of each pool: fewest prompt tokens to compute, fewest sequences to decode."""

from collections.abc import Sequence

from cluster.scheduler.fleet.member import Member
from cluster.scheduler.placement.placement_policy import PlacementChoice
from sim.baselines.dispatch import Offer, decodes, prefills


class LeastLoaded:
    def choose(self, offer: Offer, members: Sequence[Member], now: float) -> PlacementChoice | None:
        source = min(prefills(members), key=lambda m: m.queued_tokens, default=None)
        return PlacementChoice(min(decodes(members), key=lambda m: m.num_seqs), source, 0.0)
