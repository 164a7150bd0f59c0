"""PolyServe: instances are binned by time-per-token tier and filled one after the other (arXiv 2507.17769; co-located).

A request goes to the most loaded instance of its tier that is still predicted to hold both targets; if there is none an idle
instance joins the tier; then the request is promoted to the next tighter tier that has room; at last it takes the least loaded
of its own tier. An instance that has become idle leaves its tier."""

from collections.abc import Sequence

from cluster.scheduler.fleet.member import Member
from cluster.scheduler.placement.placement_policy import PlacementChoice
from sim.baselines.dispatch import Offer, decodes
from sim.baselines.predict import tpot_s, ttft_s


class PolyServe:
    def __init__(self) -> None:
        self._tiers: dict[str, float] = {}

    def choose(self, offer: Offer, members: Sequence[Member], now: float) -> PlacementChoice | None:
        pool = decodes(members)
        for member in pool:
            if not member.num_seqs:
                self._tiers.pop(member.address, None)
        tier = offer.slo.tpot_s
        own = [m for m in pool if self._tiers.get(m.address) == tier]
        chosen = self._fullest(offer, own) or self._newcomer(pool, tier) or self._promoted(offer, pool, tier)
        return PlacementChoice(chosen or min(own or pool, key=_load), None, 0.0)

    def _fullest(self, offer: Offer, pool: Sequence[Member]) -> Member | None:
        ask, slo = offer.ask, offer.slo
        able = [
            m
            for m in pool
            if ttft_s(m, ask) <= slo.ttft_s
            and tpot_s(m, ask) <= slo.tpot_s
            and m.num_seqs < m.info.max_num_seqs
            and m.free_blocks
            >= m.blocks_needed(ask.num_tokens, offer.hashes, ask.cached_blocks.get(m.address, 0))
        ]
        return max(able, key=_load, default=None)

    def _newcomer(self, pool: Sequence[Member], tier: float) -> Member | None:
        idle = next((m for m in pool if m.address not in self._tiers), None)
        if idle is not None:
            self._tiers[idle.address] = tier
        return idle

    def _promoted(self, offer: Offer, pool: Sequence[Member], tier: float) -> Member | None:
        for tighter in sorted({t for t in self._tiers.values() if t < tier}, reverse=True):
            found = self._fullest(offer, [m for m in pool if self._tiers.get(m.address) == tighter])
            if found is not None:
                return found
        return None


def _load(member: Member) -> tuple[int, int]:
    return member.num_seqs, member.queued_tokens
