"""What it would cost to run a request here or there. Every term is in seconds, so that terms add up.

cost(prefill p -> decode d) = max(queue(p) + compute(p), max(queue(p), wait(p, d)) + link(p, d)) + handover + link_share
                              + pressure(d) + preemption(d)
cost(holder h  -> decode d) = the same, + harm(h): a decode instance that has the prefix cached computes the rest and sends it all
cost(local on d)            = queue(d) + compute(d) + harm(d)                           + pressure(d) + preemption(d)

queue       prompt tokens queued there / its prompt tokens per second
compute     tokens of this prompt that it has not cached / its prompt tokens per second
wait        until the KV that is promised to others has left p for d
link        bytes of KV that d has not cached / bandwidth from p to d, as it was measured, or else assumed by where their hosts
            stand. KV is pushed layer by layer while prefill computes, so only what is longer than the computation is felt
link_share  a part of link even where it is hidden: the link is taken from others
handover    messages between p and d that a local run does not need
harm        while d computes a prompt, the sequences it decodes get their tokens late: compute x (running sequences + 1 that will
            come) x ITL_HARM. The weight says how bad a second of delay in the middle of an answer is against one before it
pressure    a fuller decode batch has longer steps: step time x share of sequence slots taken, over the first tokens
preemption  a pool that is nearly full preempts: fill^4 as its probability x the time to compute the sequence again
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Final

from cluster.scheduler.fleet.link_model import LinkModel, Nearest
from cluster.scheduler.fleet.member import DEFAULT_TOKENS_PER_S, Member
from cluster.scheduler.placement.placement_policy import PlacementChoice, PlacementQuery
from cluster.scheduler.placement.transfer import transfer_s
from core.kv import num_blocks_for

_SHORTLIST: Final = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class CostModel:
    """Constants of the cost, until they are measured for each deployment."""

    links: LinkModel = field(default_factory=LinkModel)
    handover_s: float = 0.003
    link_share: float = 0.1
    itl_harm: float = 0.5
    pressure_tokens: float = 32.0
    """The number of tokens over whose time the pressure on a decode batch is counted."""
    noise: float = 0.02
    noise_s: float = 0.001
    """Decode instances whose costs differ by less than this (a share, and seconds) count as equal. Among them the one with fewer
    sequences is taken, then the one that registered first, so that jitter in what was measured decides nothing."""


class Rates:
    """Prompt rates: an instance's own, else the fleet's mean, else an assumption."""

    def __init__(self) -> None:
        self._fleet = 0.0

    def measured(self, member: Member) -> None:
        rate = member.measured_tokens_per_s
        if rate > 0:
            self._fleet = rate if self._fleet == 0 else 0.95 * self._fleet + 0.05 * rate

    def tokens_per_s(self, member: Member) -> float:
        return member.measured_tokens_per_s or self._fleet or DEFAULT_TOKENS_PER_S


class CostPolicy:
    """Takes the cheapest of all places by predicted seconds."""

    def __init__(self, local_threshold_tokens: int, model: CostModel | None = None) -> None:
        self._threshold = local_threshold_tokens
        self._model = model or CostModel()
        self._rates = Rates()

    def measured(self, member: Member) -> None:
        self._rates.measured(member)

    def tokens_per_s(self, member: Member) -> float:
        return self._rates.tokens_per_s(member)

    def has_prompt_room(self, member: Member, *, late: bool) -> bool:
        return member.has_prompt_room(self.tokens_per_s(member), late)

    def least_work_s(self, ask: PlacementQuery, members: Sequence[Member]) -> float:
        return min((ask.uncached(m) / self.tokens_per_s(m) for m in members), default=0.0)

    def choose(
        self, ask: PlacementQuery, decodes: Sequence[Member], prefills: Sequence[Member], now: float
    ) -> PlacementChoice | None:
        sources, nearest = self._sources(ask, prefills)
        chosen: tuple[Member, Member | None] | None = None
        cost_s = limit_s = inf
        for decode in sorted(decodes, key=_num_seqs) if len(decodes) > 1 else decodes:
            to_move = ask.to_move(decode)
            decode_s = self._decode_s(ask, decode, to_move)
            if decode_s >= limit_s:
                continue
            way_s, source = self._cheapest(decode, to_move, sources, nearest, limit_s - decode_s)
            if way_s + decode_s < limit_s:
                chosen, cost_s = (decode, source), way_s + decode_s
                limit_s = cost_s * (1 - self._model.noise) - self._model.noise_s
        return None if chosen is None else PlacementChoice(*chosen, cost_s, now + cost_s > ask.due_at)

    def choose_prefill(
        self, ask: PlacementQuery, decode: Member, prefills: Sequence[Member], now: float
    ) -> PlacementChoice:
        sources, nearest = self._sources(ask, prefills)
        way_s, source = self._cheapest(decode, ask.to_move(decode), sources, nearest)
        return PlacementChoice(decode, source, way_s)

    def _sources(
        self, ask: PlacementQuery, prefills: Sequence[Member]
    ) -> tuple[list["_Source"], "Nearest[_Source] | None"]:
        """Return (the quickest few, all by where they stand)."""
        sources = sorted([self._source(ask, p) for p in prefills], key=_total_s)
        nearest = Nearest((source.member.spot, source) for source in sources) if sources else None
        return sources[:_SHORTLIST], nearest

    def _cheapest(
        self,
        decode: Member,
        to_move: int,
        sources: Sequence["_Source"],
        nearest: "Nearest[_Source] | None",
        limit_s: float = inf,
    ) -> tuple[float, Member | None]:
        """Return the seconds of the cheapest way, and its source: `decode` alone (None), one of the quickest few, or the quickest
        of the nearest.

        A way that takes `limit_s` or more is not wanted, so its seconds need not be exact."""
        best_s: float = self._local_s(decode, to_move)
        best: Member | None = None
        if nearest is None or to_move <= self._threshold:
            return best_s, best
        handover_s = self._model.handover_s
        for source in sources:
            if source.total_s + handover_s >= min(best_s, limit_s):
                break
            if source.member is not decode:
                cost_s = self._disaggregated_s(source, decode, to_move)
                if cost_s < best_s:
                    best_s, best = cost_s, source.member
        source = nearest.to(decode.spot)
        if source.total_s + handover_s < min(best_s, limit_s) and source.member is not decode:
            cost_s = self._disaggregated_s(source, decode, to_move)
            if cost_s < best_s:
                best_s, best = cost_s, source.member
        return best_s, best

    def _source(self, ask: PlacementQuery, member: Member) -> "_Source":
        rate = self.tokens_per_s(member)
        queue_s, compute_s = member.queued_tokens / rate, ask.uncached(member) / rate
        return _Source(member, queue_s, compute_s)

    def _disaggregated_s(self, source: "_Source", decode: Member, to_move: int) -> float:
        model, member = self._model, source.member
        wait_s, link_s = transfer_s(model.links, member, decode, to_move * decode.kv_token_bytes)
        harm_s = 0.0
        if member.decodes:
            harm_s = source.compute_s * (member.num_seqs + 1) * model.itl_harm
        there_s = max(source.total_s, max(source.queue_s, wait_s) + link_s)
        return there_s + harm_s + model.handover_s + model.link_share * link_s

    def _local_s(self, decode: Member, to_move: int) -> float:
        rate = self.tokens_per_s(decode)
        compute_s = to_move / rate
        harm_s = compute_s * (decode.num_seqs + 1) * self._model.itl_harm if decode.decodes else 0.0
        return decode.queued_tokens / rate + compute_s + harm_s

    def _decode_s(self, ask: PlacementQuery, decode: Member, to_move: int) -> float:
        """Return pressure + preemption."""
        pressure_s = self._model.pressure_tokens * decode.step_s * (decode.num_seqs + 1) / decode.max_num_seqs
        taken_blocks = decode.state_blocks + num_blocks_for(to_move + ask.growth_tokens, decode.block_size)
        fill = 1.0 - max(0, decode.free_blocks - taken_blocks) / decode.num_blocks
        return pressure_s + fill**4 * ask.num_tokens / self.tokens_per_s(decode)


class _Source:
    """A prefill instance, and the seconds until this prompt would be computed there."""

    __slots__ = ("compute_s", "member", "queue_s", "total_s")

    def __init__(self, member: Member, queue_s: float, compute_s: float) -> None:
        self.member, self.queue_s, self.compute_s = member, queue_s, compute_s
        self.total_s = queue_s + compute_s


def _num_seqs(member: Member) -> int:
    return member.num_seqs


def _total_s(source: _Source) -> float:
    return source.total_s
