"""Takes the place where a request keeps its targets, and all others theirs, at the least cost.

A place is a decode instance and what computes the prompt: itself, a prefill instance, or a peer that has the prefix cached. For
each the time to the first token and the time per token are predicted (`outlook`). A place is
- harmful, if the decode batch would then miss its tightest target: it is never taken;
- in time, if both of the request's own targets hold with a margin: of these the cheapest is taken;
- late otherwise: only if there is no other, the one that is late by least.

The cost is the GPU time that the place takes from the fleet, and a risk that grows as a prediction nears its target. An idle
instance that begins to decode pays for a step of its own for each token; one more sequence in a batch costs nearly nothing. So
decode batches fill up as far as targets allow, instances without them compute prompts at full speed, and roles move with the
load, without draining."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from typing import Final

from cluster.scheduler.fleet.link_model import Nearest
from cluster.scheduler.fleet.member import Member
from cluster.scheduler.placement.cost_policy import CostModel, Rates
from cluster.scheduler.placement.outlook import Outlook, alone_step_s, decode_step_s
from cluster.scheduler.placement.placement_policy import PlacementChoice, PlacementQuery
from cluster.scheduler.placement.transfer import transfer_s

_SHORTLIST: Final = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class SloModel:
    ttft_margin: float = 0.9
    tpot_margin: float = 0.92
    """The shares of the targets up to which predictions are trusted."""
    reach: float = 1.5
    """No target counts as tighter than this many steps of a sequence that is alone."""
    delay_weight: float = 0.1
    """The cost of a second until the first token, in seconds of GPU time."""
    risk_weight: float = 2.0
    """The cost of a prediction at its margin, in times of the request's own GPU time."""
    room_s: float = 0.1
    """Seconds of prompt work that an instance is given beyond the steps that are planned there, so that it never waits for the
    scheduler."""


class SloPolicy:
    """A PlacementPolicy by targets and cost."""

    def __init__(
        self, local_threshold_tokens: int, model: SloModel | None = None, links: CostModel | None = None
    ) -> None:
        self._threshold = local_threshold_tokens
        self._model, self._links = model or SloModel(), links or CostModel()
        self._rates = Rates()

    def measured(self, member: Member) -> None:
        self._rates.measured(member)

    def tokens_per_s(self, member: Member) -> float:
        return self._rates.tokens_per_s(member)

    def outlook(self, member: Member) -> Outlook:
        """Return the member's outlook, worked out again only where something has changed."""
        known = member.outlook
        if isinstance(known, Outlook) and known.version == member.version:
            return known
        outlook = member.outlook = Outlook(member, self._rates.tokens_per_s(member))
        return outlook

    def has_prompt_room(self, member: Member, *, late: bool) -> bool:
        """Return whether the prompt work is less than the steps that are planned and a little more."""
        outlook = self.outlook(member)
        return (outlook.all_s if late else outlook.queue_s) < self._model.room_s + outlook.lag_s

    def least_work_s(self, ask: PlacementQuery, members: Sequence[Member]) -> float:
        return min((self._work_s(ask, self.outlook(m), ask.uncached(m)) for m in members), default=0.0)

    def choose(
        self, ask: PlacementQuery, decodes: Sequence[Member], prefills: Sequence[Member], now: float
    ) -> PlacementChoice | None:
        sources, nearest = self._sources(ask, prefills)
        delay_weight = self._model.delay_weight
        late, best = True, inf
        chosen: Member | None = None
        computes: Member | None = None
        for use_s, tpot_share, decode in self._able(ask, decodes):
            if not late and best < use_s:
                break
            to_move = ask.to_move(decode)
            for source in self._ways(ask, decode, to_move, sources, nearest):
                if not late and best < use_s + source.work_s + delay_weight * source.ttft_s:
                    continue
                is_late, cost = self._cost(
                    ask, decode, to_move, source, use_s=use_s, tpot_share=tpot_share, now=now
                )
                if chosen is None or (late if is_late is not late else cost < best):
                    late, best, chosen, computes = is_late, cost, decode, source.member
        return (
            None
            if chosen is None
            else PlacementChoice(chosen, None if computes is chosen else computes, best, late)
        )

    def choose_prefill(
        self, ask: PlacementQuery, decode: Member, prefills: Sequence[Member], now: float
    ) -> PlacementChoice:
        sources, nearest = self._sources(ask, prefills)
        to_move = ask.to_move(decode)
        ways = self._ways(ask, decode, to_move, sources, nearest)
        best = min(ways, key=lambda way: way.ttft_s + self._exposed_s(way, decode, to_move))
        return PlacementChoice(decode, None if best.member is decode else best.member, best.ttft_s)

    def _sources(
        self, ask: PlacementQuery, prefills: Sequence[Member]
    ) -> tuple[list["_Source"], "Nearest[_Source] | None"]:
        """Return (the quickest few; all, by where they stand). As long as links are taken to be alike, those that are no quicker
        and have no less to compute are left out."""
        sources = sorted((self._source(ask, p, ask.uncached(p)) for p in prefills), key=_ttft_s)
        shortlist: list[_Source] = []
        for source in sources:
            differs = source.member.out_links.is_known
            if not shortlist or source.work_s < shortlist[-1].work_s or differs:
                shortlist.append(source)
        nearest = Nearest((source.member.spot, source) for source in sources) if sources else None
        return shortlist[:_SHORTLIST], nearest

    def _ways(
        self,
        ask: PlacementQuery,
        decode: Member,
        to_move: int,
        sources: Sequence["_Source"],
        nearest: "Nearest[_Source] | None",
    ) -> list["_Source"]:
        """Yield the instances that may compute the prompt: `decode`, the quickest few, and the quickest of the nearest."""
        ways = [self._source(ask, decode, to_move)]
        if nearest is None or to_move <= self._threshold:
            return ways
        ways += [source for source in sources if source.member is not decode]
        near = nearest.to(decode.spot)
        if near.member is not decode and near not in ways:
            ways.append(near)
        return ways

    def _source(self, ask: PlacementQuery, member: Member, num_tokens: int) -> "_Source":
        outlook = self.outlook(member)
        work_s = self._work_s(ask, outlook, num_tokens)
        queue_s = outlook.all_s if ask.late else outlook.queue_s
        return _Source(member, outlook.lag_s + queue_s + work_s, work_s)

    def _work_s(self, ask: PlacementQuery, outlook: Outlook, num_tokens: int) -> float:
        return outlook.prompt_s(num_tokens, ask.num_tokens - num_tokens)

    def _able(self, ask: PlacementQuery, decodes: Sequence[Member]) -> list[tuple[float, float, Member]]:
        """Return the instances whose batch keeps its targets, the least GPU time first: (GPU time that decoding there takes from
        the fleet, share of the target that a step then takes, instance). The search may stop where an instance takes too much."""
        length, reach = ask.expected_tokens, self._model.reach
        context = ask.num_tokens + length / 2
        able: list[tuple[float, float, Member]] = []
        for decode in decodes:
            step_s = decode_step_s(decode, 1, context)
            floor_s = reach * alone_step_s(decode, context)
            before_s = 0.0
            if decode.batch_seqs:
                if step_s > self._model.tpot_margin * max(decode.tightest_tpot_s, floor_s):
                    continue
                before_s = decode_step_s(decode, 0, 0.0)
            able.append((length * max(0.0, step_s - before_s), step_s / max(ask.tpot_s, floor_s), decode))
        able.sort(key=_use_s)
        return able

    def _cost(
        self,
        ask: PlacementQuery,
        decode: Member,
        to_move: int,
        source: "_Source",
        *,
        use_s: float,
        tpot_share: float,
        now: float,
    ) -> tuple[bool, float]:
        """Return (late, cost). Late places are compared by how late they are."""
        model = self._model
        exposed_s = 0.0
        if source.member is not decode:
            exposed_s = self._exposed_s(source, decode, to_move)
            wait_s = exposed_s + self.outlook(decode).joins_s(source.ttft_s)
            tpot_share += wait_s / max(1.0, ask.short_tokens) / ask.tpot_s
        left_s = ask.due_at - now
        ttft_share = source.ttft_s / left_s if left_s > 0 else inf
        risk = max(ttft_share / model.ttft_margin, tpot_share / model.tpot_margin)
        gpu_s = use_s + source.work_s
        if risk > 1 and ask.due_at < inf:
            return True, source.ttft_s / ask.slo.ttft_s + tpot_share
        return False, gpu_s * (1 + model.risk_weight * risk**4) + model.delay_weight * (
            source.ttft_s + exposed_s
        )

    def _exposed_s(self, source: "_Source", decode: Member, to_move: int) -> float:
        """Return the time that the transfer adds before the second token, and what it takes from others' link."""
        links = self._links
        wait_s, link_s = transfer_s(links.links, source.member, decode, to_move * decode.kv_token_bytes)
        begins_s = max(source.ttft_s - source.work_s, wait_s)
        return links.handover_s + max(0.0, begins_s + link_s - source.ttft_s) + links.link_share * link_s


class _Source:
    """What computes the prompt, when the first token would be there, and what part of that is this prompt's own work."""

    __slots__ = ("member", "ttft_s", "work_s")

    def __init__(self, member: Member, ttft_s: float, work_s: float) -> None:
        self.member, self.ttft_s, self.work_s = member, ttft_s, work_s


def _use_s(able: tuple[float, float, Member]) -> float:
    return able[0]


def _ttft_s(source: _Source) -> float:
    return source.ttft_s
