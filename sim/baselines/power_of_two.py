"""The less loaded of two instances drawn at random, in each pool (Mitzenmacher, IEEE TPDS 12(10), 2001); Ray Serve's default.

Load is the number of requests for decode, and prompt tokens to be computed for prefill."""

import random
from collections.abc import Callable, Sequence

from cluster.scheduler.fleet.member import Member
from cluster.scheduler.placement.placement_policy import PlacementChoice
from sim.baselines.dispatch import Offer, decodes, prefills


class PowerOfTwo:
    def __init__(self, seed: int = 0) -> None:
        self._rng = random.Random(seed)

    def choose(self, offer: Offer, members: Sequence[Member], now: float) -> PlacementChoice | None:
        sources = prefills(members)
        source = self._of_two(sources, lambda m: m.queued_tokens) if sources else None
        return PlacementChoice(self._of_two(decodes(members), lambda m: m.num_seqs), source, 0.0)

    def _of_two(self, pool: Sequence[Member], load: Callable[[Member], float]) -> Member:
        return min(self._rng.sample(pool, min(2, len(pool))), key=load)
