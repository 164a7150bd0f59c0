"""llm-d's endpoint picker: weighted scores in [0, 1], the highest wins (llm-d inference scheduler).

prefix-cache-scorer 2: share of the prompt's blocks that are cached; queue-scorer 1: 1 for the shortest queue, 0 for the longest;
kv-cache-utilization-scorer 1: share of free blocks. The prefill and the decode profile use the same scorers; ties are drawn."""

import random
from collections.abc import Sequence

from cluster.scheduler.fleet.member import Member
from cluster.scheduler.placement.placement_policy import PlacementChoice
from sim.baselines.dispatch import Offer, decodes, prefills


class LlmD:
    def __init__(self, prefix: float = 2.0, queue: float = 1.0, kv: float = 1.0, seed: int = 0) -> None:
        self._prefix, self._queue, self._kv = prefix, queue, kv
        self._rng = random.Random(seed)

    def choose(self, offer: Offer, members: Sequence[Member], now: float) -> PlacementChoice | None:
        sources = prefills(members)
        source = self._pick(offer, sources) if sources else None
        return PlacementChoice(self._pick(offer, decodes(members)), source, 0.0)

    def _pick(self, offer: Offer, pool: Sequence[Member]) -> Member:
        queues = [_queue(m) for m in pool]
        shortest, span = min(queues), max(queues) - min(queues)
        num_blocks = max(1, len(offer.hashes))
        scores = [
            self._prefix * offer.ask.cached_blocks.get(member.address, 0) / num_blocks
            + self._queue * (1.0 - (queue - shortest) / span if span else 1.0)
            + self._kv * member.free_blocks / member.info.num_blocks
            for member, queue in zip(pool, queues, strict=True)
        ]
        best = max(scores)
        return self._rng.choice([m for m, score in zip(pool, scores, strict=True) if score == best])


def _queue(member: Member) -> int:
    """Return the number of requests that wait there, and of those that were sent and no report shows yet."""
    return (
        max(member.num_waiting, member.num_seqs - member.num_running, 0)
        if member.info.decodes
        else member.num_reservations
    )
