"""The global scheduler: facts in, decisions out. Pure.

The queue lives here, so a request is bound to instances only when it can start (late binding). Between load reports the
scheduler counts what it has promised, so that a burst does not herd onto one instance.

A waiter that does not fit is passed by smaller ones for at most BYPASS_S; from then on nothing behind it is placed until it
is. So big requests neither block the queue at once nor starve."""

from collections.abc import Callable
from dataclasses import dataclass

from cluster.fleet import Instance, Promise
from cluster.policy import CostPolicy, PlacementPolicy
from cluster.prefix_index import PrefixIndex
from cluster.scoring import Choice
from cluster.waiting import DrainRate, Waiter, WaitingQueue
from core.config import ScheduleConfig
from core.messages import (
    Finished,
    LoadReport,
    Message,
    NeedPrefill,
    Place,
    Placed,
    PrefillAssigned,
    Register,
    Rejected,
    Status,
)
from core.types import Route

BYPASS_S = 2.0
SETTLE_S = 0.25
"""After this long a promise shows in the instance's own reports."""
NOBODY_GRACE_S = 15.0
"""How long requests wait for a first (or restarting) decode instance."""


@dataclass(frozen=True, slots=True)
class Heard:
    """A message from a peer."""

    sender: str
    message: Message


@dataclass(frozen=True, slots=True)
class PeerLost:
    """An instance or a frontend is gone."""

    address: str


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed."""


Event = Heard | PeerLost | Tick


@dataclass(frozen=True, slots=True)
class Send:
    to: str
    message: Message


@dataclass(frozen=True, slots=True)
class _Placement:
    frontend: str
    instances: tuple[str, ...]


class GlobalScheduler:
    """`on(event, now)` is its only entry. `log` gets one line for each decision, without times."""

    def __init__(
        self,
        config: ScheduleConfig,
        policy: PlacementPolicy | None = None,
        log: Callable[[str], None] | None = None,
    ) -> None:
        self._config = config
        self._policy = policy or CostPolicy(config.local_threshold_tokens)
        self._log = log or (lambda _: None)
        self._fleet: dict[str, Instance] = {}
        self._index = PrefixIndex()
        self._queue = WaitingQueue()
        self._rate = DrainRate()
        self._placements: dict[str, _Placement] = {}
        self._num_arrived = 0

    @property
    def num_queued(self) -> int:
        return len(self._queue)

    @property
    def num_placements(self) -> int:
        return len(self._placements)

    def on(self, event: Event, now: float) -> list[Send]:
        """What to send because of `event`."""
        out: list[Send] = []
        match event:
            case Heard(sender, Place() as place):
                self._arrive(sender, place, now, out)
            case Heard(_, Finished(request_id, attempt)):
                self._finish(f"{request_id}#{attempt}")
            case Heard(_, Register() as info):
                self._register(info)
            case Heard(_, LoadReport() as report):
                self._report(report, now)
            case Heard(sender, NeedPrefill() as need):
                self._replace_prefill(sender, need, now, out)
            case PeerLost(address):
                self._lose(address)
            case _:
                pass
        num_placed = self._dispatch(now, out)
        self._expire(now, out)
        self._rate.observe(len(self._queue), num_placed, now)
        return out

    def status(self, nonce: int) -> Status:
        why_not = "" if any(i.info.decodes for i in self._fleet.values()) else "no decode instance is alive"
        instances = tuple(self._fleet[address].status() for address in sorted(self._fleet))
        return Status(nonce, why_not, len(self._queue), instances)

    # Facts ----------------------------------------------------------------------------------------------------------

    def _arrive(self, frontend: str, place: Place, now: float, out: list[Send]) -> None:
        key = f"{place.request_id}#{place.attempt}"
        if self._queue.get(key) is not None or key in self._placements:
            return
        decodes = [i for i in self._fleet.values() if i.info.decodes]
        if decodes and not any(i.holds(place.num_tokens + place.max_new_tokens) for i in decodes):
            self._reject(frontend, place, "prompt and output exceed the KV cache of every instance", 0.0, out)
            return
        self._queue.add(Waiter(key, frontend, place, now, self._num_arrived))
        self._num_arrived += 1
        wait_s = self._rate.wait_s(len(self._queue), now)
        if len(self._queue) > self._config.max_queued_requests or wait_s > self._config.max_queue_wait_s:
            self._refuse_one(wait_s, now, out)

    def _refuse_one(self, wait_s: float, now: float, out: list[Send]) -> None:
        waiter = self._queue.last_refusable()
        if waiter is None:
            return
        self._queue.remove(waiter)
        reason = f"{len(self._queue)} requests are waiting"
        if wait_s > self._config.max_queue_wait_s:
            reason += f"; the predicted wait of {wait_s:.0f} s exceeds {self._config.max_queue_wait_s:g} s"
        self._reject(waiter.frontend, waiter.place, reason, self._retry_after_s(now), out)

    def _register(self, info: Register) -> None:
        self._forget(info.address)
        self._fleet[info.address] = Instance(info)
        self._log(f"up {info.address}")

    def _report(self, report: LoadReport, now: float) -> None:
        instance = self._fleet.get(report.address)
        if instance is not None:
            instance.report(report, now - SETTLE_S)
            self._index.update(report.address, report.cache_added, report.cache_removed)

    def _finish(self, key: str) -> None:
        waiter = self._queue.get(key)
        if waiter is not None:
            self._queue.remove(waiter)
        placement = self._placements.pop(key, None)
        for address in placement.instances if placement else ():
            if address in self._fleet:
                self._fleet[address].release(key)

    def _lose(self, address: str) -> None:
        if address in self._fleet:
            self._log(f"down {address}")
            self._forget(address)
            return
        for waiter in [w for w in self._queue if w.frontend == address]:
            self._queue.remove(waiter)
        for key in [key for key, placement in self._placements.items() if placement.frontend == address]:
            self._finish(key)

    def _forget(self, address: str) -> None:
        self._fleet.pop(address, None)
        self._index.drop(address)

    def _replace_prefill(self, decode: str, need: NeedPrefill, now: float, out: list[Send]) -> None:
        key = f"{need.request_id}#{need.attempt}"
        fleet = [self._fleet[address] for address in sorted(self._fleet)]
        chosen = self._policy.choose_prefill(need.num_tokens, fleet, need.lost)
        placement = self._placements.get(key)
        if chosen is not None and placement is not None and chosen.address not in placement.instances:
            chosen.promise(key, Promise(now, 0, 0, need.num_tokens, ()))
            self._placements[key] = _Placement(placement.frontend, (*placement.instances, chosen.address))
        address = chosen.address if chosen else ""
        self._log(f"prefill {key} {address or 'local'}")
        out.append(Send(decode, PrefillAssigned(need.request_id, need.attempt, need.epoch, address)))

    # Decisions ------------------------------------------------------------------------------------------------------

    def _dispatch(self, now: float, out: list[Send]) -> int:
        """Place whoever can start, in order. Returns how many were placed."""
        if not len(self._queue) or not self._fleet:
            return 0
        fleet = [self._fleet[address] for address in sorted(self._fleet)]
        num_placed = 0
        for waiter in list(self._queue):
            choice = self._policy.choose(waiter.place, fleet, self._index.runs(waiter.place.block_hashes))
            if choice is not None:
                self._place(waiter, choice, now, out)
                num_placed += 1
                continue
            waiter.blocked_since_s = now if waiter.blocked_since_s is None else waiter.blocked_since_s
            if now - waiter.blocked_since_s > BYPASS_S:
                break
        return num_placed

    def _place(self, waiter: Waiter, choice: Choice, now: float, out: list[Send]) -> None:
        place, decode, prefill = waiter.place, choice.decode, choice.prefill
        self._queue.remove(waiter)
        hashes = place.block_hashes
        local_tokens = choice.uncached_tokens if prefill is None else 0
        decode.promise(waiter.key, Promise(now, 1, choice.decode_blocks, local_tokens, hashes))
        addresses = [decode.address]
        if prefill is not None and prefill is not decode:
            prefill.promise(waiter.key, Promise(now, 1, 0, choice.uncached_tokens, ()))
            addresses.append(prefill.address)
        self._placements[waiter.key] = _Placement(waiter.frontend, tuple(addresses))
        route = Route(decode.address, prefill.address if prefill else "")
        self._log(f"place {waiter.key} {route.prefill or 'local'} {route.decode}")
        out.append(Send(waiter.frontend, Placed(place.request_id, place.attempt, route)))

    def _expire(self, now: float, out: list[Send]) -> None:
        """Refuse those who have waited too long, sooner when there is nobody to wait for."""
        nobody = not any(i.info.decodes for i in self._fleet.values())
        limit_s = (
            min(NOBODY_GRACE_S, self._config.max_queue_wait_s) if nobody else self._config.max_queue_wait_s
        )
        for waiter in [w for w in self._queue if now - w.arrived_s >= limit_s]:
            self._queue.remove(waiter)
            reason = "no decode instance is alive" if nobody else f"no place became free within {limit_s:g} s"
            self._reject(waiter.frontend, waiter.place, reason, self._retry_after_s(now), out)

    def _retry_after_s(self, now: float) -> float:
        config = self._config
        return self._rate.retry_after_s(
            len(self._queue), config.max_queued_requests, config.max_queue_wait_s, now
        )

    def _reject(
        self, frontend: str, place: Place, reason: str, retry_after_s: float, out: list[Send]
    ) -> None:
        self._log(f"reject {place.request_id}#{place.attempt}")
        out.append(Send(frontend, Rejected(place.request_id, place.attempt, reason, retry_after_s)))
