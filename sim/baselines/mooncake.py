"""Mooncake's Algorithm 1 with early rejection (Qin et al., FAST '25: KVCache-centric scheduling).

Prefill: the instance with the least predicted TTFT = queue + computing what it has not cached. Decode: the one with the least
predicted time between tokens. A request that would miss either target is refused before anything is computed for it. The
algorithm's other branch, which first fetches a prefix from a prefill instance that has much more of it, is left out: it would
need moves between prefill instances, which the simulated runtime has not.

Where any instance does either role one instance does both for a request: the one with the least predicted TTFT among those that
are predicted to hold the time between tokens."""

from collections.abc import Sequence

from cluster.scheduler.fleet.member import Member
from cluster.scheduler.placement.placement_policy import PlacementChoice
from sim.baselines.dispatch import Offer, decodes, prefills
from sim.baselines.predict import tpot_s, ttft_s


class Mooncake:
    def choose(self, offer: Offer, members: Sequence[Member], now: float) -> PlacementChoice | None:
        ask, slo = offer.ask, offer.slo
        sinks = decodes(members)
        sources = prefills(members)
        able = [m for m in sinks if tpot_s(m, ask) <= slo.tpot_s]
        source = min(sources or able, key=lambda m: ttft_s(m, ask), default=None)
        if source is None or not able or ttft_s(source, ask) > slo.ttft_s:
            return None
        if not sources:
            return PlacementChoice(source, None, 0.0)
        return PlacementChoice(min(able, key=lambda m: tpot_s(m, ask)), source, 0.0)
