"""Arrow-like: stateless instances whose role is where requests are sent; roles flip with the load (Arrow, arXiv 2505.11916).

Prefill goes to the prefill instance with the least predicted TTFT; if that misses the target, the decode instance with the least
decode load becomes one, as long as another is left. Decode goes to the decode instance with the fewest running tokens; if its
predicted time per token misses the target, the prefill instance with the least work becomes one. What an instance had begun
in its old role it finishes there, so nothing is drained."""

from collections.abc import Sequence

from cluster.scheduler.fleet.member import Member
from cluster.scheduler.placement.placement_policy import PlacementChoice
from sim.baselines.dispatch import Offer
from sim.baselines.predict import tpot_s, ttft_s


class Arrow:
    def __init__(self, prefill_share: float = 0.5) -> None:
        self._share = prefill_share
        self._prefills: set[str] = set()
        self._started = False

    def choose(self, offer: Offer, members: Sequence[Member], now: float) -> PlacementChoice | None:
        if not self._started:
            self._started = True
            self._prefills = {m.address for m in members[: max(1, round(len(members) * self._share))]}
        source = min(self._pool(members, prefill=True), key=lambda m: ttft_s(m, offer.ask))
        if ttft_s(source, offer.ask) > offer.slo.ttft_s:
            source = self._to_prefill(offer, members) or source
        sink = min(self._pool(members, prefill=False), key=_running_tokens)
        if tpot_s(sink, offer.ask) > offer.slo.tpot_s:
            sink = self._to_decode(source, members) or sink
        return PlacementChoice(sink, source, 0.0)

    def _pool(self, members: Sequence[Member], *, prefill: bool) -> list[Member]:
        return [m for m in members if (m.address in self._prefills) == prefill]

    def _to_prefill(self, offer: Offer, members: Sequence[Member]) -> Member | None:
        """Return whether the rest of the decode pool could take the load."""
        pool = sorted(self._pool(members, prefill=False), key=_running_tokens)
        if len(pool) < 2 or tpot_s(pool[1], offer.ask) > offer.slo.tpot_s:
            return None
        self._prefills.add(pool[0].address)
        return pool[0]

    def _to_decode(self, busy: Member, members: Sequence[Member]) -> Member | None:
        pool = [m for m in self._pool(members, prefill=True) if m is not busy]
        idlest = min(pool, key=lambda m: m.queued_tokens, default=None)
        if idlest is not None:
            self._prefills.discard(idlest.address)
        return idlest


def _running_tokens(member: Member) -> float:
    return member.context_tokens + member.num_seqs
