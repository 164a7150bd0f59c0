"""Ray Serve LLM's PrefixCacheAffinityRouter (Ray 2.60), for the instances that compute prompts.

While queue lengths differ by no more than a threshold: the shorter queue of those that match the longest prefix among what was
routed before; where that is less than a tenth of the prompt, of those to which the least text was routed. Otherwise, of two drawn
at random. What was routed is remembered in the router's own tree, not asked of the instances. The threshold is infinite by
default, which sends every conversation that shares its beginning to one instance: it is set, as Ray's guide advises."""

import random
from collections import Counter
from collections.abc import Sequence

from cluster.scheduler.fleet.member import Member
from cluster.scheduler.fleet.prefix_index import PrefixIndex
from cluster.scheduler.placement.placement_policy import PlacementChoice
from sim.baselines.dispatch import Offer, decodes, prefills


class RayAffinity:
    def __init__(
        self, imbalanced_threshold: float = 5.0, match_rate_threshold: float = 0.1, seed: int = 0
    ) -> None:
        self._imbalanced, self._match_rate = imbalanced_threshold, match_rate_threshold
        self._rng = random.Random(seed)
        self._routed = PrefixIndex()
        self._sizes: Counter[str] = Counter()

    def choose(self, offer: Offer, members: Sequence[Member], now: float) -> PlacementChoice | None:
        sinks, sources = decodes(members), prefills(members)
        pool = sources or sinks
        candidates = self._candidates(offer, pool)
        chosen = min(self._rng.sample(candidates, min(2, len(candidates))), key=_queue)
        self._routed.update(chosen.address, offer.hashes, ())
        self._sizes[chosen.address] += offer.ask.num_tokens
        if not sources:
            return PlacementChoice(chosen, None, 0.0)
        return PlacementChoice(min(self._rng.sample(sinks, min(2, len(sinks))), key=_queue), chosen, 0.0)

    def _candidates(self, offer: Offer, pool: Sequence[Member]) -> list[Member]:
        queues = [_queue(m) for m in pool]
        if max(queues) - min(queues) > self._imbalanced:
            return list(pool)
        runs = self._routed.match(offer.hashes)
        best = max((runs.get(m.address, 0) for m in pool), default=0)
        if best * pool[0].info.block_size < self._match_rate * offer.ask.num_tokens:
            smallest = min(self._sizes[m.address] for m in pool)
            return [m for m in pool if self._sizes[m.address] == smallest]
        return [m for m in pool if runs.get(m.address, 0) == best]


def _queue(member: Member) -> float:
    """Return the number of requests that are there: a prefill instance's reservations, a decode instance's sequences."""
    return member.num_reservations if member.info.prefills and not member.info.decodes else member.num_seqs
