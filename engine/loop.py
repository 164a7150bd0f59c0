"""The engine: drives one instance's steps and keeps the next one planned while one runs."""

import asyncio
import logging
from bisect import insort
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from math import inf

from core.config.adapter_config import HoldAdapters
from core.cost.steps import StepModels
from core.errors import Bug, OutOfMemory, RequestError
from core.messages import Grant
from core.output_marks import MARKS
from core.plan import StepPlan, StepResult
from core.ports import Clock, EngineEvents, WorkerGroup
from core.reports import DroppedBlocks, LayerExperts, TierCounts, WorkCounts
from core.request_checks import ANY_TOKEN, check_computable
from core.types import Request, TokenOut
from engine.planning.expert_counts import ExpertCounts
from engine.planning.planned_reservations import Reservation
from engine.planning.planner_load import PlannerLoad
from engine.planning.planner_protocol import Planner
from engine.planning.prompt_pace import PromptPace
from engine.planning.step_bounds import StepBounds
from engine.planning.step_time_fit import StepFits
from engine.step_watch import StepWatch
from engine.tiers.held_blocks import CacheEvents
from engine.tiers.restoring import Restoring

log = logging.getLogger(__name__)

_SMOOTHING = 0.2
_MARKED = frozenset(mark - 1 for mark in MARKS)
"""`TokenOut.index` of the tokens with which an output comes to a mark."""
_InFlight = deque[tuple[StepPlan, asyncio.Future[StepResult]]]


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLoad:
    planned: PlannerLoad
    """Requests whose blocks or prefix are still to come wait, too."""
    tokens_per_s: float
    """Prompt tokens per second of recent steps that computed prompts; 0 without any."""
    step_s: float
    steps: StepModels


@dataclass(slots=True)
class _Waiter:
    request: Request
    future: "asyncio.Future[Reservation]"


class Engine:
    """One instance's engine. Everything may be called before `run`; tokens come while it runs."""

    def __init__(
        self,
        scheduler: Planner,
        group: WorkerGroup,
        clock: Clock,
        *,
        lookahead: bool = True,
        tiers: Restoring | None = None,
        fits: StepFits | None = None,
        vocab_size: int = ANY_TOKEN,
        bounds: StepBounds | None = None,
        held_up: Callable[[], bool] = lambda: False,
    ) -> None:
        """`tiers` are where prefixes that the device does not hold may be had from. `fits` learn from every step. A request with
        a token that is not below `vocab_size` is refused. `bounds` and `held_up` as in StepWatch."""
        self._scheduler, self._group, self._clock, self._tiers = scheduler, group, clock, tiers
        self.cached: CacheEvents = tiers or scheduler.prefixes
        """What comes to the pool or the tiers, and what neither has any more."""
        self._fits, self._vocab_size = fits or StepFits(), vocab_size
        self._depth = 2 if lookahead else 1
        self._changed = asyncio.Event()
        self._reserving: deque[_Waiter] = deque()
        self._pace = PromptPace()
        self._step_s = 0.0
        self._num_steps = self._num_computed = self._num_replayed = self._num_taken_back = 0
        self._closing = False
        self._watch = StepWatch(group, bounds, held_up)
        self._tiers_error: Exception | None = None
        if tiers is not None:
            tiers.listen(self._blocks_may_be_free, self._tiers_failed)
        self._received: list[str] = []
        self._grown: list[tuple[str, int]] = []
        self._experts = ExpertCounts()

    def add(self, request: Request, *, push: Grant | None = None) -> None:
        """Compute `request` here. With `push` its KV is sent on, it samples tokens until `hold`, and its blocks stay until
        `release`. Raises RequestError when it can never fit or be computed."""
        check_computable(request, self._vocab_size)
        self._scheduler.sequences.check_fits(request)
        self._has_come(request)
        if self._tiers is None:
            self._add(request, push)
        else:
            self._tiers.forward(request, lambda: self._add(request, push))

    def _add(self, request: Request, push: Grant | None) -> None:
        self._scheduler.sequences.add(request, push)
        self._changed.set()

    def reserve(self, request: Request) -> "asyncio.Future[Reservation]":
        """Wait for blocks for the request's known tokens, by class and then in the order of the calls. Cancelling it withdraws
        it."""
        future: asyncio.Future[Reservation] = asyncio.get_running_loop().create_future()
        self._has_come(request)
        try:
            check_computable(request, self._vocab_size)
            self._scheduler.sequences.check_fits(request)
        except RequestError as error:
            future.set_exception(error)
            return future
        if self._tiers is None:
            self._queue_reservation(_Waiter(request, future))
        else:
            self._tiers.forward(request, lambda: self._queue_reservation(_Waiter(request, future)))
        return future

    def _queue_reservation(self, waiter: _Waiter) -> None:
        insort(self._reserving, waiter, key=_priority)
        self._serve_reservations()

    def _has_come(self, request: Request) -> None:
        self._received.append(request.key)
        self._scheduler.sessions.begins(request, self._clock.now())

    def activate(self, reservation: Reservation, sampled: Sequence[TokenOut]) -> None:
        """Go on with a sequence. The reserved blocks have the KV of all known tokens and of all `sampled` (elsewhere) but the
        last."""
        self._scheduler.reservations.activate(reservation.key, sampled, self._clock.now())
        self._blocks_may_be_free()

    def compute(self, reservation: Reservation) -> None:
        """Compute here what the reserved blocks lack."""
        self._scheduler.reservations.compute(reservation.key)
        self._changed.set()

    def go_on(self, key: str) -> None:
        """Compute a paused sequence again. Idempotent."""
        self._scheduler.sequences.go_on(key)
        self._changed.set()

    def release(self, key: str) -> None:
        """Give back a reservation or a pushed sequence, whose writers or readers are gone."""
        self._scheduler.reservations.release(key)
        self._blocks_may_be_free()

    def abort(self, key: str) -> None:
        """Stop computing. Idempotent; reservations and pushed sequences keep their blocks until `release`."""
        if self._tiers is None or not self._tiers.abort(key):
            self._scheduler.sequences.abort(key)
        self._blocks_may_be_free()

    def load(self) -> EngineLoad:
        now, steps = self._clock.now(), self._fits.models
        planned = self._scheduler.load(now, steps)
        num_to_come = len(self._reserving) + (self._tiers.num_waiting if self._tiers else 0)
        return EngineLoad(
            planned=replace(planned, num_waiting=planned.num_waiting + num_to_come),
            tokens_per_s=self._pace.tokens_per_s(now),
            step_s=self._step_s,
            steps=steps,
        )

    def tier_counts(self) -> TierCounts:
        return self._tiers.counts if self._tiers else TierCounts()

    def work_counts(self) -> WorkCounts:
        planned = self._scheduler.load()
        return WorkCounts(
            steps=self._num_steps,
            computed_tokens=self._num_computed,
            prefix_queried_tokens=planned.prefix_tokens[0],
            prefix_hit_tokens=planned.prefix_tokens[1],
            preempted=planned.num_preempted,
            returned=planned.num_returned,
            replayed_steps=self._num_replayed,
            draft_tokens=planned.draft_tokens[0],
            accepted_tokens=planned.draft_tokens[1],
            out_of_memory_steps=self._num_taken_back,
            sessions=self._scheduler.sessions.counts,
        )

    def drain_experts(self, *, again: bool = False) -> tuple[LayerExperts, ...]:
        """Return how often each expert was chosen so far. Returns nothing when nothing is new, unless it is asked for `again`."""
        return self._experts.drain(again=again)

    def drain_received(self) -> tuple[str, ...]:
        """Return the keys of the requests that have come since the last call."""
        received = tuple(self._received)
        self._received.clear()
        return received

    def drain_grown(self) -> tuple[tuple[str, int], ...]:
        """Return (attempt, output tokens) of each output that has come to a mark since the last call."""
        grown = tuple(self._grown)
        self._grown.clear()
        return grown

    def drop_cache(self) -> DroppedBlocks:
        """Give up what the pool and the tiers keep of requests that are over."""
        host, disk = self._tiers.drop() if self._tiers else (0, 0)
        device, in_use = self._scheduler.prefixes.drop_cache(), self._scheduler.load().num_used_blocks
        return DroppedBlocks(device=device, host=host, disk=disk, in_use=in_use)

    async def hold_adapters(self, asked: HoldAdapters) -> dict[str, str]:
        """As `WorkerGroup.hold_adapters`. Raises ReplicaLost."""
        with self._watch.disturbed():
            return await self._group.hold_adapters(asked)

    def hint_session(self, tenant: str, name: str, *, release: bool) -> bool:
        """Release a session, or read its KV back. Returns whether it is known here."""
        sessions = self._scheduler.sessions
        known = sessions.release(tenant, name) if release else sessions.prefetch(tenant, name)
        self._changed.set()
        return known

    async def run(self, events: EngineEvents) -> None:
        """Run until `close`. While one step runs, one more is planned and submitted behind it."""
        in_flight: _InFlight = deque()
        self._group.on_ready(self._mask_is_ready)
        lost = asyncio.create_task(self._group.lost())
        lost.add_done_callback(lambda _: self._changed.set())
        try:
            while not self._closing:
                if self._tiers_error is not None:
                    raise self._tiers_error
                self._scheduler.sessions.read_due(self._clock.now())
                while (
                    len(in_flight) < self._depth
                    and (plan := self._scheduler.plan(self._clock.now(), self._fits.models)) is not None
                ):
                    in_flight.append((plan, asyncio.ensure_future(self._group.execute(plan))))
                    await asyncio.sleep(0)  # the step starts before the next one is planned
                if not in_flight:
                    if lost.done():
                        raise lost.result()
                    self._changed.clear()
                    if stuck := self._scheduler.sequences.stuck_pushes:
                        events.on_stuck(stuck)
                    await self._something_changes()
                    continue
                await self._end_step(in_flight, events)
        except Exception as error:
            events.on_error(error)
        finally:
            for task in (lost, *(task for _, task in in_flight)):
                task.cancel()
            await asyncio.gather(lost, *(task for _, task in in_flight), return_exceptions=True)
            self._watch.close()

    async def _something_changes(self) -> None:
        """Wait until something has changed, or a session is to be read back."""
        due_at = self._scheduler.sessions.next_due_at
        with suppress(TimeoutError):
            async with asyncio.timeout(None if due_at == inf else max(0.0, due_at - self._clock.now())):
                await self._changed.wait()

    def _tiers_failed(self, error: Exception) -> None:
        self._tiers_error = error
        self._changed.set()

    async def close(self) -> None:
        self._closing = True
        self._changed.set()
        for waiter in self._reserving:
            waiter.future.cancel()
        if self._tiers is not None:
            await self._tiers.close()
        await self._group.close()

    def _mask_is_ready(self, key: str, num_tokens: int) -> None:
        self._scheduler.sequences.mask_ready(key, num_tokens)
        self._changed.set()

    async def _end_step(self, in_flight: _InFlight, events: EngineEvents) -> None:
        """Wait for the first step in flight."""
        plan, task = in_flight[0]
        try:
            result = await self._watch.result(plan, task, self._fits.models)
        except OutOfMemory as error:
            await self._take_back(in_flight, error, events)
        else:
            in_flight.popleft()
            if tokens := self._commit(plan, result):
                events.on_tokens(tokens)
            if result.failed:
                events.on_failed(result.failed)
        self._blocks_may_be_free()

    def _commit(self, plan: StepPlan, result: StepResult) -> list[TokenOut]:
        tokens = self._scheduler.commit(plan, result, self._clock.now())
        self._grown += [(token.key, token.index + 1) for token in tokens if token.index in _MARKED]
        self._experts.add(result.expert_loads)
        self._num_steps += 1
        self._num_replayed += result.replayed
        self._num_computed += plan.size.num_tokens
        self._measure(plan, result)
        return tokens

    async def _take_back(self, in_flight: _InFlight, error: OutOfMemory, events: EngineEvents) -> None:
        """Undo the steps in flight, since there was no memory for the first of them, so that a smaller one is planned. Raises
        `error` where there is none."""
        first, _ = in_flight[0]
        for plan, task in in_flight:
            with suppress(OutOfMemory):
                await self._watch.result(plan, task, self._fits.models)
                raise Bug(f"what follows step {first.step} was computed")
        in_flight.clear()
        back = self._scheduler.take_back()
        self._num_taken_back += 1
        log.warning(
            "there is no memory for a step of %d tokens and %d sequences, which is %s: %s (requests %s)",
            first.num_tokens,
            len(first.work),
            "planned again" if back.goes_on else "as small as it gets",
            error,
            ", ".join(work.key for work in first.work),
        )
        if not back.goes_on:
            raise error
        if back.paused or back.lost:
            events.on_taken_back(back.paused, back.lost)

    def _measure(self, plan: StepPlan, result: StepResult) -> None:
        if result.duration_s <= 0:
            return
        self._fits.observe(plan, result.duration_s)
        self._step_s = _smooth(self._step_s, result.duration_s)
        prompt_tokens = plan.size.num_prompt
        if prompt_tokens >= 8:
            self._pace.note(self._clock.now(), prompt_tokens / result.duration_s)

    def _blocks_may_be_free(self) -> None:
        self._serve_reservations()
        self._changed.set()

    def _serve_reservations(self) -> None:
        while self._reserving:
            waiter = self._reserving[0]
            if not waiter.future.cancelled():
                reservations = self._scheduler.reservations
                reservation = reservations.reserve(waiter.request)
                if reservation is None and reservations.make_room(waiter.request, self._clock.now()):
                    reservation = reservations.reserve(waiter.request)
                if reservation is None:
                    return
                waiter.future.set_result(reservation)
            self._reserving.popleft()


def _priority(waiter: _Waiter) -> int:
    """Order reservations by class, so that higher classes are served first."""
    return -waiter.request.slo.priority


def _smooth(old: float, new: float) -> float:
    return new if old == 0 else old + _SMOOTHING * (new - old)
