"""The global scheduler: where each request runs, or that it must wait or come back later. Pure: facts in, decisions out.

Invariants:
- The queue lives here. A request is placed only on a decode instance with headroom for its prompt and expected growth, by the
  last report and everything promised since; and a prompt only where less than about a second of prompt work is queued.
- Every Arrived is answered by exactly one Placed or Rejected, unless its frontend finishes it or is lost before.
- What was promised to an instance is given back when the request is Finished, its frontend or that instance is lost.

Order and fairness: requests are tried in order (`cluster.waiting`); one that finds no headroom is passed by smaller ones, but
once it has been passed by for PATIENCE_S the first such request claims the decode instance with the most free blocks that could
hold it: nothing else is placed there until the claimant is. One claim at a time. Prompt room is asked before a prompt is
counted, so a long prompt gets it as soon as a short one.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from cluster.buddies import Buddies
from cluster.events import Arrived, Event, PeerLost, PrefillNeeded, Send, Tick
from cluster.fleet import Member, Promise
from cluster.prefix_index import PrefixIndex
from cluster.scoring import Ask, Choice, CostPolicy, PlacementPolicy
from cluster.waiting import DrainRate, Waiter, WaitingQueue
from core.config import ScheduleConfig
from core.messages import (
    Buddy,
    Finished,
    Leaving,
    LoadReport,
    NeedPrefill,
    Place,
    Placed,
    PrefillAssigned,
    Register,
    Rejected,
    Status,
)
from core.types import Route

GROWTH_TOKENS = 256
"""Room that is kept for a sequence's output, if it may be as long; longer outputs rely on others ending before."""
FETCH_TOKENS = 128
"""A cached prefix as long as this is worth asking a decode instance for."""
PATIENCE_S = 1.0
NO_DECODE_WAIT_S = 5.0
"""How long requests wait for the first decode instance: instances may be restarting."""
_SETTLE_REPORTS = 2.0
_SETTLE_S = 0.2
"""A promise shows in reports made this long, and so many report intervals, after it: the way is scheduler, frontend, worker."""
_MAX_PASSED = 32
"""Requests that others may pass in one go; so many large ones at the head do hold the small ones behind them up."""
_NO_DECODE = "no decode instance is alive"


@dataclass(slots=True)
class _Placement:
    """A request that was placed and is not finished."""

    frontend: str
    place: Place
    route: Route


class GlobalScheduler:
    """Feed it events in the order they happen, with `now` never going back, and carry out the actions it returns.

    `log` gets one line per decision, without times: two runs with the same events and the same order give the same lines."""

    def __init__(
        self,
        config: ScheduleConfig,
        policy: PlacementPolicy | None = None,
        log: Callable[[str], None] | None = None,
    ) -> None:
        self._config = config
        self._policy = policy or CostPolicy(config.local_threshold_tokens)
        self._log = log or _ignore
        self._settle_s = _SETTLE_REPORTS * config.report_interval_s + _SETTLE_S
        self._members: dict[str, Member] = {}
        self._prefixes = PrefixIndex()
        self._queue = WaitingQueue()
        self._placements: dict[str, _Placement] = {}
        self._drain = DrainRate()
        self._buddies = Buddies()
        self._num_arrived = 0
        self._largest_tokens = 0
        self._no_decode_since_s: float | None = None
        self._claim: tuple[str, str] | None = None
        """(key of a waiter, address of the decode instance that is kept for it)"""

    @property
    def num_queued(self) -> int:
        return len(self._queue)

    @property
    def num_placed(self) -> int:
        return len(self._placements)

    @property
    def members(self) -> tuple[Member, ...]:
        """The living instances, in order of registration."""
        return tuple(self._members.values())

    def why_not(self) -> str:
        """Why a request that came now would not be answered; empty: it would be (a 429 under load is an answer, too)."""
        return "" if any(m.info.decodes and not m.leaving for m in self._members.values()) else _NO_DECODE

    def status(self, nonce: int = 0) -> Status:
        instances = tuple(member.status() for member in self._members.values())
        return Status(nonce, self.why_not(), len(self._queue), instances)

    def on(self, event: Event, now: float) -> list[Send]:
        """Take one fact in; what follows from it, in the order to be sent."""
        match event:
            case Arrived(frontend, place):
                return self._on_arrived(frontend, place, now)
            case Finished(request_id, attempt):
                self._finish(_key(request_id, attempt))
            case Register():
                self._on_register(event)
                self._buddies.forget(event.address)
                return self._pair() + self._place_waiting(now)
            case Leaving(address):
                self._on_leaving(address)
                return self._pair() + self._place_waiting(now)
            case LoadReport(address):
                self._on_report(event, now)
                return self._place_waiting(now, self._members.get(address))
            case PeerLost(address):
                self._on_lost(address)
                return self._pair() + self._place_waiting(now)
            case PrefillNeeded(decode, need):
                return self._on_prefill_needed(decode, need, now)
            case Tick():
                return self._expire(now) + self._place_waiting(now)
        return self._place_waiting(now)

    # --- arrivals and admission ------------------------------------------------------------------------------------
    def _on_arrived(self, frontend: str, place: Place, now: float) -> list[Send]:
        key = _key(place.request_id, place.attempt)
        if (known := self._placements.get(key)) is not None:
            return [Send(frontend, Placed(place.request_id, place.attempt, known.route))]
        if self._queue.get(key) is not None:
            return []
        self._num_arrived += 1
        waiter = Waiter(key, frontend, place, now, self._num_arrived)
        total = place.num_tokens + place.max_new_tokens
        if 0 < self._largest_tokens < total:
            reason = f"{total} tokens (prompt and output) do not fit: the largest instance holds {self._largest_tokens}"
            return [self._reject(waiter, reason, 0.0)]
        self._queue.add(waiter)
        return self._place_waiting(now) + self._refuse_excess(waiter, now)

    def _refuse_excess(self, waiter: Waiter, now: float) -> list[Send]:
        """Refuse the newcomer if it would wait too long, or the last in order if too many wait.

        Requests that go on after a lost instance were admitted before, and are never refused for load on arrival."""
        if self._queue.get(waiter.key) is None:
            return []
        if len(self._queue) > self._config.max_queued_requests:
            last = self._queue.last_refusable()
            return [] if last is None else [self._refuse(last, f"{len(self._queue)} requests wait", now)]
        wait_s = self._drain.wait_s(self._queue.position(waiter), now)
        if waiter.place.attempt == 0 and wait_s > self._config.max_queue_wait_s:
            return [self._refuse(waiter, f"it would wait about {wait_s:.0f} s for a place", now)]
        return []

    def _expire(self, now: float) -> list[Send]:
        """Refuse those that have waited too long."""
        limit_s = self._config.max_queue_wait_s
        late = [w for w in self._queue if now - w.arrived_s > limit_s]
        actions = [self._refuse(w, f"no place was free for {limit_s:g} s", now) for w in late]
        if not self.why_not():
            self._no_decode_since_s = None
            return actions
        if self._no_decode_since_s is None:
            self._no_decode_since_s = now
        since_s = self._no_decode_since_s
        alone = [w for w in self._queue if now - max(since_s, w.arrived_s) >= NO_DECODE_WAIT_S]
        for waiter in alone:
            self._leave(waiter)
        return actions + [self._reject(w, _NO_DECODE, NO_DECODE_WAIT_S) for w in alone]

    def _refuse(self, waiter: Waiter, reason: str, now: float) -> Send:
        """429: take a waiter out of the queue and say when to come back."""
        config = self._config
        retry_after_s = self._drain.retry_after_s(
            len(self._queue), config.max_queued_requests, config.max_queue_wait_s, now
        )
        self._leave(waiter)
        return self._reject(waiter, f"the cluster is busy: {reason}", retry_after_s)

    def _reject(self, waiter: Waiter, reason: str, retry_after_s: float) -> Send:
        place = waiter.place
        self._log(f"reject {waiter.key} {'later' if retry_after_s else 'never'}")
        return Send(waiter.frontend, Rejected(place.request_id, place.attempt, reason, retry_after_s))

    # --- placing ---------------------------------------------------------------------------------------------------
    def _place_waiting(self, now: float, changed: Member | None = None) -> list[Send]:
        """Place all that can be placed now, in order; where only `changed` has news, who found no headroom tries only that."""
        actions: list[Send] = []
        num_passed = 0
        while num_passed < min(len(self._queue), _MAX_PASSED) and self._any_headroom():
            waiter = self._queue[num_passed]
            still_blocked = changed is not None and self._still_blocked(waiter, changed)
            action = None if still_blocked else self._try_to_place(waiter, now)
            if action is None:
                num_passed += 1
            else:
                actions.append(action)
        self._drain.observe(len(self._queue), len(actions), now)
        return actions

    def _any_headroom(self) -> bool:
        return any(
            m.info.decodes and m.num_seqs < m.info.max_num_seqs and m.free_blocks > 0
            for m in self._members.values()
        )

    def _try_to_place(self, waiter: Waiter, now: float) -> Send | None:
        place = waiter.place
        hits = self._prefixes.runs(place.block_hashes)
        total = place.num_tokens + place.max_new_tokens
        able = [
            m
            for m in self._members.values()
            if m.info.decodes and not m.leaving and m.capacity_tokens >= total
        ]
        usable = _without(able, place.exclude)
        decodes = [m for m in usable if self._has_headroom(m, waiter, hits.get(m.address, 0))]
        wanted = place.prefer or self._buddies.heir(place.exclude)
        decodes = [m for m in decodes if m.address == wanted] or decodes
        if not decodes:
            self._claim_for(waiter, usable, now)
            return None
        waiter.blocked_since_s = None
        ask = Ask(place.num_tokens, _growth(place), hits)
        prefills = self._prefills(place, place.exclude) + self._holders(ask, place.exclude)
        choice = self._policy.choose(ask, decodes, prefills, now)
        if choice is None:
            return None
        source = self._members.get(place.source)
        if source is not None and source is not choice.decode:
            choice = Choice(choice.decode, source, choice.cost_s)
        elif not self._has_prompt_room(ask, choice):
            return None
        return self._dispatch(waiter, ask, choice, now)

    def _still_blocked(self, waiter: Waiter, changed: Member) -> bool:
        if waiter.blocked_since_s is None:
            return False
        num_cached = self._prefixes.runs(waiter.place.block_hashes).get(changed.address, 0)
        return not changed.info.decodes or not self._has_headroom(changed, waiter, num_cached)

    def _prefills(self, place: Place, exclude: Sequence[str]) -> list[Member]:
        able = [
            m
            for m in self._members.values()
            if m.info.prefills and not m.leaving and m.capacity_tokens > place.num_tokens
        ]
        return _without(able, exclude)

    def _holders(self, ask: Ask, exclude: Sequence[str]) -> list[Member]:
        """Decode instances that have so much of the prompt cached that it may be fetched from there."""
        found = (self._members.get(address) for address in ask.cached_blocks)
        return [
            m
            for m in found
            if m is not None
            and m.info.decodes
            and m.info.sends
            and not m.leaving
            and m.address not in exclude
            and m.capacity_tokens > ask.num_tokens
            and ask.num_tokens - ask.uncached(m) >= FETCH_TOKENS
        ]

    def _has_headroom(self, member: Member, waiter: Waiter, num_cached: int) -> bool:
        if self._claim is not None and self._claim[1] == member.address and self._claim[0] != waiter.key:
            return False
        if member.num_seqs >= member.info.max_num_seqs:
            return False
        return _blocks_needed(member, waiter.place, num_cached) <= member.free_blocks

    def _has_prompt_room(self, ask: Ask, choice: Choice) -> bool:
        if choice.prefill is None and ask.uncached(choice.decode) <= self._config.local_threshold_tokens:
            return True
        return choice.computes.has_prompt_room(self._policy.tokens_per_s(choice.computes))

    def _claim_for(self, waiter: Waiter, usable: Sequence[Member], now: float) -> None:
        """Nothing has headroom for `waiter`: after a while, keep an instance for it."""
        if waiter.blocked_since_s is None:
            waiter.blocked_since_s = now
        if usable and self._claim is None and now - waiter.blocked_since_s >= PATIENCE_S:
            member = max(usable, key=lambda m: m.free_blocks)
            self._claim = (waiter.key, member.address)
            self._log(f"claim {waiter.key} {member.address}")

    def _dispatch(self, waiter: Waiter, ask: Ask, choice: Choice, now: float) -> Send:
        place, key, decode, prefill = waiter.place, waiter.key, choice.decode, choice.prefill
        self._leave(waiter)
        num_blocks = _blocks_needed(decode, place, ask.cached_blocks.get(decode.address, 0))
        compute_tokens = ask.uncached(decode) if prefill is None else 0
        decode.promise(key, Promise(now, 1, num_blocks, compute_tokens, place.block_hashes))
        if prefill is not None:
            prefill.promise(key, Promise(now, 0, 0, ask.uncached(prefill), ()))
        route = Route(decode.address, "" if prefill is None else prefill.address)
        self._placements[key] = _Placement(waiter.frontend, place, route)
        self._log(f"place {key} {route.prefill or 'local'} {route.decode}")
        return Send(waiter.frontend, Placed(place.request_id, place.attempt, route))

    def _leave(self, waiter: Waiter) -> None:
        self._queue.remove(waiter)
        if self._claim is not None and self._claim[0] == waiter.key:
            self._claim = None

    def _on_prefill_needed(self, decode: str, need: NeedPrefill, now: float) -> list[Send]:
        """A reservation on `decode` lost its prefill instance: another one, or the decode instance itself, at once."""
        key = _key(need.request_id, need.attempt)
        placement, holder = self._placements.get(key), self._members.get(decode)
        prefill = ""
        if placement is not None and holder is not None and placement.route.decode == decode:
            if (old := self._members.get(placement.route.prefill)) is not None:
                old.release(key)
            place = placement.place
            hits = self._prefixes.runs(place.block_hashes)
            ask = Ask(place.num_tokens, _growth(place), hits, missing_tokens=need.num_tokens)
            prefills = [m for m in self._prefills(place, ()) if m.address not in (need.lost, decode)]
            choice = self._policy.choose_prefill(ask, holder, prefills, now)
            if choice.prefill is not None:
                choice.prefill.promise(key, Promise(now, 0, 0, ask.uncached(choice.prefill), ()))
                prefill = choice.prefill.address
            placement.route = Route(decode, prefill)
        self._log(f"prefill {key} {prefill or 'local'} {decode}")
        answer = PrefillAssigned(need.request_id, need.attempt, need.epoch, prefill)
        return [Send(decode, answer), *self._place_waiting(now)]

    # --- what is known ---------------------------------------------------------------------------------------------
    def _finish(self, key: str) -> None:
        if (waiter := self._queue.get(key)) is not None:
            self._leave(waiter)
        if (placement := self._placements.pop(key, None)) is not None:
            for address in (placement.route.decode, placement.route.prefill):
                if (member := self._members.get(address)) is not None:
                    member.release(key)

    def _on_register(self, info: Register) -> None:
        known = self._members.get(info.address)
        if known is not None:
            if known.info == info:
                return
            self._on_lost(info.address)
        self._members[info.address] = Member(info)
        if info.decodes:
            self._largest_tokens = max(self._largest_tokens, info.num_blocks * info.block_size)

    def _pair(self) -> list[Send]:
        return [Send(a, Buddy(buddy)) for a, buddy in self._buddies.pair(list(self._members.values()))]

    def _on_leaving(self, address: str) -> None:
        if (member := self._members.get(address)) is not None:
            member.leaving = True
            if self._claim is not None and self._claim[1] == address:
                self._claim = None

    def _on_report(self, report: LoadReport, now: float) -> None:
        if (member := self._members.get(report.address)) is None:
            return
        member.report(report, settled_before_s=now - self._settle_s)
        self._prefixes.update(report.address, report.cache_added, report.cache_removed)
        self._policy.measured(member)

    def _on_lost(self, address: str) -> None:
        if self._members.pop(address, None) is not None:
            self._prefixes.drop(address)
        if self._claim is not None and self._claim[1] == address:
            self._claim = None
        gone = [k for k, p in self._placements.items() if address in (p.route.decode, p.frontend)]
        gone += [waiter.key for waiter in self._queue if waiter.frontend == address]
        for key in gone:
            self._finish(key)


def _key(request_id: str, attempt: int) -> str:
    return f"{request_id}#{attempt}"


def _growth(place: Place) -> int:
    return min(place.max_new_tokens, GROWTH_TOKENS)


def _blocks_needed(member: Member, place: Place, num_cached: int) -> int:
    return member.blocks_needed(place.num_tokens + _growth(place), place.block_hashes, num_cached)


def _without(members: list[Member], exclude: Sequence[str]) -> list[Member]:
    """The members that are not excluded, or all where that leaves none."""
    return [m for m in members if m.address not in exclude] or members


def _ignore(_: str) -> None:
    pass
