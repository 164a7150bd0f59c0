"""From a request that waits to the place it gets: who has headroom, what the policy prefers, and what that reserves.

Invariants: a request is placed only on a decode instance with blocks for its prompt and expected growth, by the last report and
everything reserved since; and a prompt only where less than about a second of prompt work is queued. What was reserved to an
instance is given back by `finish`.

A request waits here until its sequence finds a slot when it gets there. Where its prompt must be begun before, it is computed
early, if the policy foresees a slot in time. None is while one that goes before it waits for such a place: those with
much time would else keep all slots from those with little.

A request that finds no headroom is passed by smaller ones, but once it has been passed by for `patience_s` the first such request
claims the decode instance with the most free blocks that could hold it: nothing else is placed there until the claimant is. One
claim at a time. Prompt room is asked before a prompt is counted, so a long prompt gets it as soon as a short one."""

from collections.abc import Callable, Sequence
from typing import Final

from cluster.scheduler.fleet.context_forecast import Contexts
from cluster.scheduler.fleet.member import CachedBlocks, Member
from cluster.scheduler.fleet.member_reservations import NO_LEVEL
from cluster.scheduler.fleet.roster import Candidates, Roster
from cluster.scheduler.placement.claim import Claim
from cluster.scheduler.placement.late_headroom import LateHeadroom, leaves_room
from cluster.scheduler.placement.load_forecast import late_if_idle
from cluster.scheduler.placement.placement import Placement, decode_reservation, prefill_reservation
from cluster.scheduler.placement.placement_policy import (
    PlacementChoice,
    PlacementPolicy,
    PlacementQuery,
    View,
)
from cluster.scheduler.placement.placement_queries import PlacementQueries
from cluster.scheduler.queue.fairness import ServiceCounters
from cluster.scheduler.queue.hopeless import IdleEstimate
from cluster.scheduler.queue.waiting_queue import Waiter, WaitingQueue
from cluster.scheduler.scheduler_peers import SchedulerPeers
from core.messages import Finished, NeedPrefill, PlacedByPeer, PlaceRequest
from core.scheduler_tuning import SchedulerTuning
from core.types import Route

RETRY_S: Final = 0.05
"""In a large fleet a waiting request is tried again when the instance it waits for has changed, or after this long."""
_SAMPLE: Final = 3


class Placer:
    def __init__(
        self,
        roster: Roster,
        policy: PlacementPolicy,
        local_threshold_tokens: int,
        counters: ServiceCounters,
        peers: SchedulerPeers,
        log: Callable[[str], None],
        *,
        tuning: SchedulerTuning,
    ) -> None:
        self._roster, self._policy, self._peers, self._log = roster, policy, peers, log
        self._threshold, self._counters, self._tuning = local_threshold_tokens, counters, tuning
        self._queries = PlacementQueries(tuning)
        self._placements: dict[str, Placement] = {}
        self._late_headroom, self._claim = LateHeadroom(tuning), Claim(log)

    def __len__(self) -> int:
        """Return the number of requests that are placed and not finished."""
        return len(self._placements)

    @property
    def placements(self) -> tuple[Placement, ...]:
        return tuple(self._placements.values())

    def get(self, key: str) -> Placement | None:
        return self._placements.get(key)

    def try_to_place(self, waiter: Waiter, now: float, *, may_be_early: bool = True) -> Route | None:
        """Bind the request to the instances that suit it best now, and return the route. None means that it waits.

        With `may_be_early` its prompt may be computed before a slot is free for its sequence."""
        place, roster = waiter.place, self._roster
        waiter.tried_at, waiter.waits_for, waiter.lacks_slot = now, None, False
        leaves = self._late_headroom.asked(waiter, now)
        candidates = roster.candidates(place, waiter.num_tries)
        waiter.num_tries += 1
        wanted = place.prefer or roster.replica_of(place.exclude)
        usable = (roster.answering if place.ends_with_prompt else roster.decodes)(place, candidates, wanted)
        cached = _cached(place, candidates)
        ask = self._queries.of(place, cached, waiter.due_at, late=waiter.is_late(now), leaves=leaves)
        early = may_be_early and waiter.is_urgent(now)
        view = self._best_view(waiter, ask, usable, candidates, now, wanted=wanted)
        if early and (view.choice is None or view.choice.late):
            in_line = self._choose(waiter, ask, view.decodes, candidates, now, early=True, level=view.level)
            view.choice = in_line or view.choice
        if not view.decodes:
            if not leaves:
                self._claim.ask(waiter, usable, now)
            return None
        waiter.blocked_since = None
        if view.choice is None:
            waiter.lacks_slot = early and not _waits_for_prompts(waiter)
            return None
        waiter.waits_for = None
        return self._bind(waiter, ask, view.choice, now)

    def _best_view(
        self,
        waiter: Waiter,
        ask: PlacementQuery,
        usable: Sequence[Member],
        candidates: Candidates,
        now: float,
        *,
        wanted: str,
    ) -> View:
        """See the instances as they are, and then, if no choice is in time, without lower classes. Return the first view with a
        choice in time, else the one that has a choice, else the last."""
        best, seen = View((), -NO_LEVEL), usable
        for level in (-NO_LEVEL, waiter.place.slo.priority):
            if level > -NO_LEVEL:
                if not self._tuning.seen_above or all(m.lowest_level >= level for m in usable):
                    break
                seen = [member.above(level) for member in usable]
            view = View(self._with_blocks(waiter, ask, seen, wanted), level)
            view.choice = self._choose(waiter, ask, view.decodes, candidates, now, level=level)
            if best.choice is None or (view.choice is not None and not view.choice.late):
                best = view
            if best.choice is not None and not best.choice.late:
                break
        return best

    def _with_blocks(
        self, waiter: Waiter, ask: PlacementQuery, usable: Sequence[Member], wanted: str
    ) -> list[Member]:
        """Return the instances that have blocks for it; `wanted` alone where that has them, and a slot."""
        contexts, cached = ask.contexts, ask.cached_blocks
        decodes = [m for m in usable if self._has_blocks(m, waiter, contexts, cached, ask.leaves)]
        if wanted:
            decodes = [m for m in decodes if m.address == wanted and m.has_slot] or decodes
        return decodes

    def _choose(
        self,
        waiter: Waiter,
        ask: PlacementQuery,
        decodes: Sequence[Member],
        candidates: Candidates,
        now: float,
        *,
        early: bool = False,
        level: int = -NO_LEVEL,
    ) -> PlacementChoice | None:
        """Return the policy's choice. It is None where the policy has none, or the prompt would only wait on its instance.

        Instances without a slot are left out unless it may be `early`. With a `level`, `decodes` are seen without lower ones
        (`Member.above`), and so are the instances that may compute the prompt."""
        if not early:
            decodes = [m for m in decodes if m.has_slot]
        if not decodes:
            return None
        place = waiter.place
        sources: list[Member] = []
        if not place.ends_with_prompt:
            seen = [m.above(level) for m in self._sources(place, candidates, decodes)]
            sources = [m for m in seen if m.can_compute(place, ask.cached_blocks)]
        choice = self._policy.choose(ask, decodes, sources, now)
        if choice is None:
            return None
        source = self._roster.get(place.source) if place.source else None
        if source is not None:
            prefill = None if source.address == choice.decode.address else source
            return PlacementChoice(choice.decode, prefill, choice.cost_s, late=choice.late)
        if not self._has_prompt_room(place, ask, choice):
            waiter.waits_for = choice.computes, choice.computes.version
            return None
        return choice

    def any_prompt_room(self, level: int, *, timed: bool) -> bool:
        """Return whether any instance could be given a prompt of that level now. `timed`: its class names a target for it."""
        return any(
            self._policy.has_prompt_room(m.above(level), late=False, timed=timed)
            for m in self._roster.shortest_queues()
        )

    def can_wait(self, waiter: Waiter, now: float) -> bool:
        """Return whether it waits for a slot that is free, and there is none."""
        place = waiter.place
        if place.ends_with_prompt or waiter.is_urgent(now):
            return False
        return not self._roster.any_slot(place.slo.priority)

    def is_blocked(self, waiter: Waiter, changed: Member | None, now: float) -> bool:
        """Return whether it found no place before and would not find one because `changed` has news. None means that any instance
        may."""
        if changed is not None and waiter.blocked_since is not None:
            match = self._roster.match(waiter.place)
            able = changed.answers if waiter.place.ends_with_prompt else changed.decodes
            seen, contexts = changed.above(waiter.place.slo.priority), self._queries.contexts(waiter.place)
            leaves = self._late_headroom.share(waiter, now)
            return not able or not self._has_blocks(seen, waiter, contexts, match, leaves)
        if self._roster.scans or now - waiter.tried_at >= RETRY_S:
            return False
        return waiter.waits_for is None or waiter.waits_for[0].version == waiter.waits_for[1]

    def replace_prefill(self, key: str, decode: str, need: NeedPrefill, now: float) -> str:
        """Return another prefill instance for a reservation on `decode` that lost its own; empty means to compute it there."""
        placement, holder = self._placements.get(key), self._roster.get(decode)
        prefill = ""
        if placement is not None and holder is not None and placement.route.decode == decode:
            if (old := self._roster.get(placement.route.prefill)) is not None:
                old.release(key)
            place = placement.place
            candidates = self._roster.candidates(place)
            ask = self._queries.of(place, candidates.match, missing_tokens=need.num_tokens)
            able = self._roster.prefills(place, candidates, (holder,), ())
            prefills = [m for m in able if m.address not in (need.lost, decode)]
            choice = self._policy.choose_prefill(ask, holder, prefills, now)
            if choice.prefill is not None:
                placement.compute_tokens = ask.uncached(choice.prefill)
                placement.moved_tokens = need.num_tokens
                choice.prefill.reserve(key, prefill_reservation(now, placement, holder))
                prefill = choice.prefill.address
            placement.route = Route(decode, prefill)
        self._log(f"prefill {key} {prefill or 'local'} {decode}")
        return prefill

    def take(self, key: str, taken: PlacedByPeer, now: float) -> None:
        """Take over what another scheduler has placed. Nothing happens where it is known already."""
        if key not in self._placements:
            placement = Placement(
                taken.frontend,
                taken.place,
                taken.route,
                taken.num_blocks,
                compute_tokens=taken.compute_tokens,
                charged_tokens=taken.expected_tokens,
                moved_tokens=taken.moved_tokens,
                scheduler=taken.scheduler,
                output=self._queries.begin(taken.place),
            )
            route, roster = taken.route, self._roster
            self._reserve(key, placement, roster.get(route.decode), roster.get(route.prefill), now)

    def finish(self, key: str, ended: Finished | None = None) -> Placement | None:
        """Give back what was reserved for a request, and learn from its end. Return None where nothing was reserved."""
        if (placement := self._placements.pop(key, None)) is not None:
            self._counters.ended(placement.place)
            if ended is not None:
                self._learn(placement, ended)
            for address in (placement.route.decode, placement.route.prefill):
                if (member := self._roster.get(address)) is not None:
                    member.release(key)
        return placement

    def grown(self, outputs: Sequence[tuple[str, int]]) -> None:
        """Learn from how many tokens outputs have that still run: (key, output tokens) of each."""
        for key, num_tokens in outputs:
            placement = self._placements.get(key)
            if placement is not None and placement.output is not None:
                if self._tuning.learns_running:
                    placement.output.grown(num_tokens)
                self._counters.charge(placement.place, placement.charge_at_least(num_tokens))
                self._note_growth(key, placement, num_tokens)

    def _note_growth(self, key: str, placement: Placement, num_output: int) -> None:
        place = placement.place
        if (decode := self._roster.get(placement.route.decode)) is not None:
            num_blocks = placement.num_blocks + decode.output_blocks(place.num_tokens, num_output)
            decode.grown(key, num_blocks, self._queries.contexts(place, num_output))

    def _learn(self, placement: Placement, ended: Finished) -> None:
        output, num_tokens = placement.output, ended.num_output_tokens
        self._counters.charge(placement.place, num_tokens - placement.charged_tokens)
        if output is not None and num_tokens:
            if ended.complete:
                output.ended(num_tokens)
                self._roster.turnover.learn(self._queries.mean_output_tokens)
            elif self._tuning.learns_running:
                output.grown(num_tokens)

    def at(self, address: str) -> list[str]:
        """Return the keys of requests that a lost instance decoded, a lost frontend asked for or a lost scheduler has placed."""
        return [
            k for k, p in self._placements.items() if address in (p.route.decode, p.frontend, p.scheduler)
        ]

    @property
    def claimed(self) -> str:
        """The instance that is kept for a request that found no room; empty where none is."""
        return self._claim.address

    def unclaim(self, address: str) -> None:
        """Give up a claim on an instance that takes nothing more."""
        if self._claim.address == address:
            self._claim.end()

    def check_claim(self, queue: WaitingQueue) -> None:
        """End the claim of a request that does not wait any more."""
        if self._claim.key and queue.get(self._claim.key) is None:
            self._claim.end()

    def _sources(self, place: PlaceRequest, found: Candidates, decodes: Sequence[Member]) -> list[Member]:
        roster, exclude = self._roster, place.exclude
        return roster.prefills(place, found, decodes, exclude) + roster.holders(place, found, exclude)

    def _has_blocks(
        self, member: Member, waiter: Waiter, contexts: Contexts, cached: CachedBlocks, leaves: float
    ) -> bool:
        """Return whether an instance has blocks for it, beside the share that it leaves, and is not kept for another."""
        address, place = member.address, waiter.place
        is_mine = self._claim.address == address
        if is_mine and self._claim.key != waiter.key:
            return False
        if self._peers.is_kept(address, is_mine=is_mine):
            return False
        return leaves_room(member, leaves) and member.has_blocks(
            place.num_tokens, contexts, place.block_hashes, cached
        )

    def _has_prompt_room(self, place: PlaceRequest, ask: PlacementQuery, choice: PlacementChoice) -> bool:
        is_short = choice.prefill is None and ask.uncached(choice.decode) <= self._threshold
        if is_short and not place.ends_with_prompt:
            return True
        return self._policy.has_prompt_room(choice.computes, late=ask.late, timed=place.slo.is_timed)

    def _bind(self, waiter: Waiter, ask: PlacementQuery, choice: PlacementChoice, now: float) -> Route:
        place, key = waiter.place, waiter.key
        decode = self._roster.real(choice.decode)
        prefill = None if choice.prefill is None else self._roster.real(choice.prefill)
        num_cached = ask.cached_blocks.get(decode.address, 0)
        num_blocks = decode.blocks_needed(place.num_tokens, place.block_hashes, num_cached)
        route = Route(decode.address, "" if prefill is None else prefill.address)
        placement = Placement(
            waiter.frontend,
            place,
            route,
            num_blocks,
            compute_tokens=ask.uncached(decode if prefill is None else prefill),
            charged_tokens=ask.expected_tokens,
            moved_tokens=0 if prefill is None else ask.to_move(decode),
            output=self._queries.begin(place),
        )
        self._reserve(key, placement, decode, prefill, now, late=ask.late)
        if self._claim.key == key:
            self._claim.end()
        self._log(f"place {key} {choice.words}")
        if choice.instead is not None:
            self._log(f"shadow {key} {choice.instead.words}")
        return route

    def _reserve(
        self,
        key: str,
        placed: Placement,
        decode: Member | None,
        prefill: Member | None,
        now: float,
        *,
        late: bool = False,
    ) -> None:
        """Count a placed request at its instances, as far as they are known here, and on its tenant's account."""
        place = placed.place
        self._placements[key] = placed
        if decode is not None:
            contexts = self._queries.contexts(place)
            decode.reserve(key, decode_reservation(now, placed, contexts, late=late))
        if prefill is not None:
            prefill.reserve(key, prefill_reservation(now, placed, decode, late=late))
        self._counters.placed(place, placed.charged_tokens)

    def least_work_s(self, place: PlaceRequest) -> float:
        """Return the least time that its prompt takes, by what is cached where."""
        candidates = self._roster.candidates(place)
        members = [*candidates.cached[:1], *self._roster.some(_SAMPLE if self._roster.scans else 1)]
        return self._policy.least_work_s(PlacementQuery(place.num_tokens, candidates.match), members)

    def hopeless(self, place: PlaceRequest) -> IdleEstimate | None:
        """Return when an idle instance would give the first token of a request that none could give in time. None: one could, or
        that is not known, or the request was admitted before, and goes on after a lost instance or moves."""
        if place.attempt or place.source:
            return None
        roster, candidates = self._roster, self._roster.candidates(place)
        members = roster.members if roster.scans else (*candidates.cached[:1], *roster.some(_SAMPLE))
        ask = PlacementQuery(place.num_tokens, candidates.match, slo=place.slo)
        return late_if_idle(ask, members, self._tuning.num_errors)


def _waits_for_prompts(waiter: Waiter) -> bool:
    """Return whether an instance was found that must compute other prompts first.

    It is a function since mypyc takes `waits_for` to be what was assigned last, whatever was called meanwhile."""
    return waiter.waits_for is not None


def _cached(place: PlaceRequest, candidates: Candidates) -> CachedBlocks:
    """Return which instances have its KV. What has just come to the instance that it wants to join is in no report yet."""
    if place.source and place.source == place.prefer:
        return {place.source: len(place.block_hashes)}
    return candidates.match
