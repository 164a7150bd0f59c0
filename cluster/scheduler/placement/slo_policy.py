"""Takes the place where a request keeps its targets, and all others theirs, at the least cost.

It is the one theory for all fleets, whether instances have roles or not.

A place is a decode instance and what computes the prompt: itself, a prefill instance, or a peer that has the prefix cached. For
each the time to the first token and the time per token are predicted (`load_forecast`). A place is
- harmful, if the decode batch would then miss its tightest target: it is never taken;
- in time, if both of the request's own targets hold with a margin: of these the cheapest is taken;
- late otherwise: only if there is no other.

The cost is the GPU time that the place takes from the fleet, and a risk that grows as a prediction nears its target. A sequence
costs what its own tokens and context add to each step. The first one in a batch costs no more: a step that computes prompts reads
the weights anyway, and under load every instance does both. So sequences spread, and roles move with the load, without draining.
The time of an instance that may only compute prompts costs a tenth, since nothing else can use it: it gets all prompts until its
queue endangers a target, and from then on instances that decode compute some themselves.

A late request has no target left to keep, so it goes where it costs others and itself least, and leaves others a share of what an
instance can decode (`reserve`). A request whose class names no targets goes where it ends soonest, at the least cost to others.

Where all slots of a decode instance are taken, a prompt may be computed elsewhere before one is free, however short it is: the
sequence then waits for a slot after its first token. That wait is predicted and counts as time per token, and no such place is
taken that would be late."""

from collections.abc import Sequence
from math import inf
from typing import Final

from cluster.scheduler.fleet.link_model import LinkModel, Nearest
from cluster.scheduler.fleet.member import Member
from cluster.scheduler.placement.learned_paces import LearnedPaces
from cluster.scheduler.placement.load_forecast import LoadForecast, alone_step_s, decode_step_s
from cluster.scheduler.placement.placement_policy import PlacementChoice, PlacementQuery
from cluster.scheduler.placement.transfer import transfer_s
from core.cost.steps import StepModel, errors_of_mean
from core.scheduler_tuning import DEFAULT_TUNING, SchedulerTuning

_SHORTLIST: Final = 4


class SloPolicy:
    """A PlacementPolicy by targets and cost."""

    def __init__(
        self,
        local_threshold_tokens: int,
        links: LinkModel | None = None,
        tuning: SchedulerTuning = DEFAULT_TUNING,
    ) -> None:
        """`links` are what is assumed of links until they are measured."""
        self._threshold, self._tuning = local_threshold_tokens, tuning
        self._links = links or LinkModel()
        self._paces = LearnedPaces()

    def measured(self, member: Member) -> None:
        self._paces.measured(member)

    def forecast(self, member: Member) -> LoadForecast:
        """Return the member's forecast, worked out again only where something has changed."""
        known = member.forecast
        if (
            isinstance(known, LoadForecast)
            and known.version == member.version
            and known.tuning is self._tuning
        ):
            return known
        forecast = member.forecast = LoadForecast(member, self._paces, self._tuning)
        return forecast

    def has_prompt_room(self, member: Member, *, late: bool, timed: bool) -> bool:
        """Return whether the prompt work is less than the steps that are planned and a little more: a whole step where no target
        is named, since nothing is lost by prompts that wait there."""
        forecast, tuning = self.forecast(member), self._tuning
        if not tuning.binds_late:
            return True
        room_s = tuning.room_s if forecast.is_learned else tuning.unlearned_room_s
        if not timed:
            room_s = max(room_s, member.step_s)
        return (forecast.all_s if late else forecast.queue_s) < room_s + forecast.lag_s

    def least_work_s(self, ask: PlacementQuery, members: Sequence[Member]) -> float:
        return min((self._work_s(ask, self.forecast(m), ask.uncached(m)) for m in members), default=0.0)

    def choose(
        self, ask: PlacementQuery, decodes: Sequence[Member], prefills: Sequence[Member], now: float
    ) -> PlacementChoice | None:
        sources, nearest = self._sources(ask, prefills)
        delay_weight = self._tuning.delay_weight
        late, best = True, inf
        chosen: Member | None = None
        computes: Member | None = None
        for use_s, step_s, target_s, decode in self._able(ask, decodes):
            if not late and best < use_s:
                break
            to_move = ask.to_move(decode)
            for source in self._ways(ask, decode, to_move, sources, nearest):
                if not late and best < use_s + source.paid_s + delay_weight * source.ttft_s:
                    continue
                found = self._cost(
                    ask, decode, to_move, source, use_s=use_s, step_s=step_s, target_s=target_s, now=now
                )
                if found is None:
                    continue
                is_late, cost = found
                if chosen is None or (late if is_late is not late else cost < best):
                    late, best, chosen, computes = is_late, cost, decode, source.member
        return (
            None
            if chosen is None
            else PlacementChoice(chosen, None if computes is chosen else computes, best, late=late)
        )

    def choose_prefill(
        self, ask: PlacementQuery, decode: Member, prefills: Sequence[Member], now: float
    ) -> PlacementChoice:
        sources, nearest = self._sources(ask, prefills)
        to_move = ask.to_move(decode)
        ways = self._ways(ask, decode, to_move, sources, nearest)
        best = min(ways, key=lambda way: way.ttft_s + self._transfer_s(way, decode, to_move)[0])
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
        """Return the instances that may compute the prompt: `decode`, the quickest few, and the quickest of the nearest. A short
        one is left to `decode`, as long as that has a slot for it."""
        ways = [self._source(ask, decode, to_move)]
        stays = decode.has_slot or not self._tuning.short_roam
        if nearest is None or (to_move <= self._threshold and stays):
            return ways
        ways += [source for source in sources if source.member is not decode]
        near = nearest.to(decode.spot)
        if near.member is not decode and near not in ways:
            ways.append(near)
        return ways

    def _source(self, ask: PlacementQuery, member: Member, num_tokens: int) -> "_Source":
        forecast = self.forecast(member)
        work_s = self._work_s(ask, forecast, num_tokens)
        queue_s = forecast.all_s if ask.late else forecast.queue_s
        paid_s = work_s if member.decodes else self._tuning.prefill_only_price * work_s
        return _Source(member, forecast.lag_s + queue_s + work_s, work_s, paid_s)

    def _work_s(self, ask: PlacementQuery, forecast: LoadForecast, num_tokens: int) -> float:
        return forecast.prompt_s(num_tokens, ask.num_tokens - num_tokens)

    def _able(
        self, ask: PlacementQuery, decodes: Sequence[Member]
    ) -> list[tuple[float, float, float, Member]]:
        """Return the instances whose batch keeps its targets, the least GPU time first: (GPU time that decoding there takes from
        the fleet, how long a step then takes, how long it may take, instance). The search may stop where an instance takes too
        much.

        A step is as long as it is predicted to read, and what the mean of a short output's steps may be off by."""
        tuning, length = self._tuning, ask.expected_tokens
        off = errors_of_mean(ask.short_tokens, tuning.sure_errors)
        context = ask.num_tokens + length / 2
        able: list[tuple[float, float, float, Member]] = []
        for decode in decodes:
            steps, prompt = self._paces.decode_steps(decode), self._paces.prompt_steps(decode)
            step_s, alone_s = decode_step_s(steps, decode, 1, ask.num_tokens), alone_step_s(steps, context)
            step_s += _sitting_out_s(steps, decode, ask.num_tokens)
            step_s *= 1 + off * steps.error
            floor_s = tuning.reach * max(alone_s, alone_step_s(prompt, context))
            limit_s = max(tuning.tpot_margin * decode.tightest_tpot_s, floor_s)
            if ask.leaves:
                limit_s = alone_s + (1 - ask.leaves) * max(0.0, limit_s - alone_s)
            if decode.batch_seqs and step_s > limit_s:
                continue
            # Experts are read anyway: by the prompts beside it, and by the others once the batch has some.
            adds_s = max(0.0, alone_s + steps.left_unread_s(1) - steps.fixed_s)
            if not tuning.alike and not decode.batch_seqs:
                adds_s = alone_s
            able.append((length * adds_s, step_s, max(ask.tpot_s, floor_s), decode))
        able.sort(key=_preference)
        return able

    def _cost(
        self,
        ask: PlacementQuery,
        decode: Member,
        to_move: int,
        source: "_Source",
        *,
        use_s: float,
        step_s: float,
        target_s: float,
        now: float,
    ) -> tuple[bool, float] | None:
        """Return (late, cost). None where a slot would not be free in time."""
        tuning = self._tuning
        slot_s = self._slot_wait_s(decode, source)
        if slot_s == inf:
            return None
        tpot_share, exposed_s, link_s = step_s / target_s, 0.0, 0.0
        if source.member is not decode:
            exposed_s, link_s = self._transfer_s(source, decode, to_move)
            wait_s = max(slot_s, exposed_s + self.forecast(decode).joins_s(source.ttft_s))
            tpot_share += wait_s / max(1.0, ask.short_tokens) / ask.tpot_s
        left_s = ask.due_at - now
        ttft_share = source.ttft_s / left_s if left_s > 0 else inf
        risk = max(ttft_share / tuning.ttft_margin, tpot_share)
        gpu_s = use_s + source.paid_s + tuning.link_share * link_s
        delay_s = source.ttft_s + max(slot_s, exposed_s)
        if risk > 1 and not decode.has_slot:
            return None
        if risk > 1 and ask.due_at < inf:
            return True, gpu_s + tuning.late_weight * delay_s
        if ask.slo.ttft_s == ask.tpot_s == inf:
            return False, gpu_s + tuning.late_weight * (delay_s + ask.expected_tokens * step_s)
        return False, gpu_s * (1 + tuning.risk_weight * risk**4) + tuning.delay_weight * delay_s

    def _slot_wait_s(self, decode: Member, source: "_Source") -> float:
        """Return how long the sequence waits for a slot after its first token; infinite where no slot is foreseen, or where
        computing the prompt needs one, too."""
        if decode.has_slot:
            return 0.0
        if source.member.decodes and not source.member.has_slot:
            return inf
        return max(0.0, self.forecast(decode).slot_s - source.ttft_s)

    def _transfer_s(self, source: "_Source", decode: Member, to_move: int) -> tuple[float, float]:
        """Return (the time that a hand-over adds before the second token, the time that its link moves the KV)."""
        num_bytes = to_move * decode.kv_token_bytes
        wait_s, link_s = transfer_s(self._links, source.member, decode, num_bytes, self._tuning)
        begins_s = max(source.ttft_s - source.work_s, wait_s)
        return self._tuning.handover_s + max(0.0, begins_s + link_s - source.ttft_s), link_s


def _sitting_out_s(steps: StepModel, decode: Member, more_tokens: int) -> float:
    """Return how much more than a step with all sequences each token takes where the pool does not hold them all: those that sit
    out share in the steps of the others, of which each reads the weights."""
    held_tokens = decode.num_blocks * decode.block_size
    over = decode.batch_context_tokens + more_tokens - held_tokens
    return steps.fixed_s * over / held_tokens if decode.all_blocks > decode.num_blocks and over > 0 else 0.0


class _Source:
    """What computes the prompt, when the first token would be there, what part of that is this prompt's own work, and what the
    work costs."""

    __slots__ = ("member", "paid_s", "ttft_s", "work_s")

    def __init__(self, member: Member, ttft_s: float, work_s: float, paid_s: float) -> None:
        self.member, self.ttft_s, self.work_s, self.paid_s = member, ttft_s, work_s, paid_s


def _preference(able: tuple[float, float, float, Member]) -> tuple[float, int]:
    """Where equal time is used, or how much is not known yet, requests spread."""
    return able[0], able[3].num_seqs


def _ttft_s(source: _Source) -> float:
    return source.ttft_s
