"""NVIDIA Dynamo's KV router: the lowest cost = overlap weight x prefill blocks + decode blocks (Dynamo, KV router guide).

Prefill blocks are those to be computed at the instance with this request (what is not cached), decode blocks those in use there
with it. In a disaggregated deployment the prefill pool is routed so,
and the decode pool by decode blocks alone (overlap weight 0)."""

from collections.abc import Sequence

from cluster.scheduler.fleet.member import Member
from cluster.scheduler.placement.placement_policy import PlacementChoice
from core.kv import num_blocks_for
from sim.baselines.dispatch import Offer, decodes, prefills


class Dynamo:
    def __init__(self, overlap_weight: float = 1.0) -> None:
        self._weight = overlap_weight

    def choose(self, offer: Offer, members: Sequence[Member], now: float) -> PlacementChoice | None:
        sinks, sources = decodes(members), prefills(members)
        if not sources:
            return PlacementChoice(min(sinks, key=lambda m: self._cost(offer, m, self._weight)), None, 0.0)
        source = min(sources, key=lambda m: self._cost(offer, m, self._weight))
        return PlacementChoice(min(sinks, key=lambda m: self._cost(offer, m, 0.0)), source, 0.0)

    def _cost(self, offer: Offer, member: Member, weight: float) -> float:
        size, ask = member.info.block_size, offer.ask
        prefill_blocks = (member.queued_tokens + ask.uncached(member)) / size
        decode_blocks = member.info.num_blocks - member.free_blocks + num_blocks_for(ask.num_tokens, size)
        return weight * prefill_blocks + decode_blocks
