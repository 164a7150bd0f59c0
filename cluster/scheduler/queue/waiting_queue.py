"""Requests that wait for a place, and the order in which they are tried.

- A level is a class's priority. All of a higher level is tried before anything of a lower one, in time or late. A request that
  goes on after a lost instance ranks one level higher: its client is mid-stream.
- A tenant's requests of one level are a line. A line that has not been served for `aging_s` ranks one level higher for each time
  that long, so no class starves (`schedule.aging_s`).
- On one level, the tenant that has had the least service by its weight goes first (`fairness`). One that is some requests behind
  another also has an instance kept for it at once where none has room: whoever has most that waits also has most that is small
  enough for what room there is.
- Among tenants of about equal service, a request that can no longer begin in time is tried after all that still can: serving it
  first would make others late as well. Where a tenant's share of the fleet is too small for what waits, its dearest prompts are
  deferred (`overload`) and tried between those two, so that as many requests as can be are in time.
- Within a line, requests go by deadline. Targets beyond `due_s` count as that, so that long ones do not wait for ever.

Invariant: every waiter is in exactly one list of its line."""

from bisect import bisect_left, insort
from collections.abc import Collection, Iterator
from heapq import heappop, heappush
from math import inf
from typing import Final

from cluster.scheduler.fleet.member import Member
from cluster.scheduler.queue.fairness import ServiceCounters, ServiceGaps, weight
from cluster.scheduler.queue.overload import Spending, dearest
from core.messages import PlaceRequest
from core.scheduler_tuning import DEFAULT_TUNING, SchedulerTuning

_SHED_EVERY_S: Final = 0.05


class Waiter:
    """One request in the queue."""

    __slots__ = (
        "arrived_at",
        "blocked_since",
        "deferred",
        "due_at",
        "frontend",
        "is_behind",
        "key",
        "lacks_slot",
        "level",
        "num_tries",
        "number",
        "place",
        "rank",
        "start_by",
        "tried_at",
        "tuning",
        "waits_for",
        "work_s",
    )  # fmt: skip

    def __init__(
        self,
        key: str,
        frontend: str,
        place: PlaceRequest,
        arrived_at: float,
        *,
        number: int,
        start_by: float = inf,
        due_at: float = inf,
        work_s: float = 0.0,
        tuning: SchedulerTuning = DEFAULT_TUNING,
    ) -> None:
        """Begun after `start_by`, it misses its time to the first token, which is due at `due_at`. `work_s` is the least time
        that its prompt takes."""
        self.key, self.frontend, self.place = key, frontend, place
        self.arrived_at, self.number, self.tuning = arrived_at, number, tuning
        self.start_by, self.due_at, self.work_s = start_by, due_at, work_s
        self.blocked_since: float | None = None
        """Since when no decode instance has had headroom for it. None means that it was not tried, or that one had."""
        self.deferred = False
        """Whether it is too dear for what its tenant's share of the fleet can do in time, as things stand."""
        self.is_behind = False
        """Whether its tenant has had much less service than another whose requests wait."""
        self.lacks_slot = False
        """Whether no instance was found to have a slot in time for it when it was last tried and was in a hurry."""
        self.num_tries = 0
        self.tried_at = -inf
        """When it last found no place."""
        self.waits_for: tuple[Member, int] | None = None
        """The instance that was best then but had too many prompts before it, and its version at that time."""
        slo = place.slo
        self.level = slo.priority + (1 if place.attempt else 0)
        self.rank = (arrived_at + min(slo.ttft_s, tuning.due_s), number)

    @property
    def line(self) -> tuple[str, int]:
        return self.place.tenant, self.level

    @property
    def claims_after_s(self) -> float:
        """How long it finds no room before an instance is kept for it."""
        return 0.0 if self.is_behind else self.tuning.patience_s

    def is_late(self, now: float) -> bool:
        """Return whether it misses its first token for certain, and lets others pass on its instance (`core.pacing.lateness`)."""
        tuning = self.tuning
        return tuning.late_yield and self.has_missed(now) and now <= self.due_at + tuning.yield_s

    def has_missed(self, now: float) -> bool:
        return now + self.work_s > self.due_at

    def is_urgent(self, now: float) -> bool:
        """Return whether it must be begun before long, and is not late yet. What goes on after a lost instance always must."""
        is_soon = self.start_by - now <= self.tuning.early_s
        return self.place.attempt > 0 or (is_soon and not self.is_late(now))


class WaitingQueue:
    def __init__(
        self,
        counters: ServiceCounters | None = None,
        aging_s: float = 10.0,
        tuning: SchedulerTuning = DEFAULT_TUNING,
    ) -> None:
        """With an `aging_s` of 0 no line ever ranks higher than its level."""
        self._counters, self._aging_s, self._tuning = counters or ServiceCounters(), aging_s, tuning
        self._by_key: dict[str, Waiter] = {}
        self._lines: dict[tuple[str, int], _Line] = {}
        """(tenant, level) -> its requests, while there are any."""
        self._num_lines: dict[str, int] = {}
        """Tenant -> number of its lines, while there are any."""
        self._spending = Spending(tuning)
        self._shed_at = -inf
        self.num_ending_with_prompt = 0
        """Waiters for which an instance that decodes nothing may have room, too."""

    def __len__(self) -> int:
        return len(self._by_key)

    def __iter__(self) -> Iterator[Waiter]:
        """Iterate in no particular order."""
        return iter(list(self._by_key.values()))

    @property
    def num_levels(self) -> int:
        """The number of levels on which some wait."""
        return len({level for _, level in self._lines})

    def get(self, key: str) -> Waiter | None:
        return self._by_key.get(key)

    def timely_level(self) -> int | None:
        """The highest level of those that can still be in time, as seen when they were last tried; None where there is none."""
        return max((level for (_, level), line in self._lines.items() if line.timely), default=None)

    def add(self, waiter: Waiter) -> None:
        tenant = waiter.place.tenant
        line = self._lines.get(waiter.line)
        if line is None:
            if tenant not in self._num_lines:
                self._counters.raise_floor(tenant, self._num_lines)
            self._num_lines[tenant] = self._num_lines.get(tenant, 0) + 1
            line = self._lines[waiter.line] = _Line(waiter.arrived_at, late_last=self._tuning.late_last)
        line.add(waiter)
        self._by_key[waiter.key] = waiter
        self.num_ending_with_prompt += waiter.place.ends_with_prompt

    def shed(self, num_instances: float, now: float) -> None:
        """Defer what keeps others from being in time on so many instances, which the tenants share by weight."""
        self._spending.observe(num_instances, now, some_wait=bool(self._by_key))
        if now < self._shed_at or not self._by_key:
            return
        self._shed_at = now + _SHED_EVERY_S
        beside_s = self._spending.beside_s
        lines = self._by_tenant()
        weights = {tenant: own[0].weight for tenant, own in lines.items()}
        work = {
            tenant: sum(line.work_s(beside_s) for line in own) / weights[tenant]
            for tenant, own in lines.items()
        }
        factors = self._counters.weighted(work)
        total = sum(weights[tenant] * factors[tenant] for tenant in lines)
        for tenant, own in lines.items():
            share = weights[tenant] * factors[tenant] / total
            _shed(own, num_instances / self._tuning.sure_share * share, beside_s, now)

    def _by_tenant(self) -> dict[str, list["_Line"]]:
        """Return each tenant's lines, the highest level first."""
        found: dict[str, list[_Line]] = {}
        for tenant, level in sorted(self._lines, key=_level, reverse=True):
            found.setdefault(tenant, []).append(self._lines[tenant, level])
        return found

    def remove(self, waiter: Waiter) -> None:
        """Remove a waiter that is answered or withdrawn."""
        del self._by_key[waiter.key]
        self.num_ending_with_prompt -= waiter.place.ends_with_prompt
        line, tenant = self._lines[waiter.line], waiter.place.tenant
        line.remove(waiter)
        if not len(line):
            del self._lines[waiter.line]
            self._num_lines[tenant] -= 1
            if not self._num_lines[tenant]:
                del self._num_lines[tenant]

    def served(self, waiter: Waiter, now: float) -> None:
        """Remove a waiter that was placed."""
        if (line := self._lines.get(waiter.line)) is not None:
            line.served_at = now
        self._spending.placed(waiter.work_s)
        self.remove(waiter)

    def in_order(self, now: float) -> Iterator[Waiter]:
        """Yield all waiters in the order in which they should be tried now. A yielded one may be removed meanwhile.

        For the order among tenants a yielded waiter counts as served, so that no tenant's line hides the others'."""
        lines = [(line, line.split(now)) for line in self._lines.values()]
        if len(lines) == 1:
            for waiter in lines[0][1]:
                waiter.is_behind = False
                yield waiter
            return
        order = _Order(self._counters.gaps(self._num_lines), now, self._aging_s)
        for line, waiters in lines:
            order.push(waiters, 0, self._counters.of(waiters[0].place.tenant), line.served_at)
        while order.heap:
            _, _, _, counter, _, index, served_at, waiters = heappop(order.heap)
            waiter = waiters[index]
            yield waiter
            order.push(waiters, index + 1, counter + self._counters.prompt_charge(waiter.place), served_at)

    def num_ahead(self, waiter: Waiter) -> int:
        """Return about how many are served before it: all of higher levels, its own line's, and as many of each other
        tenant's."""
        tenant, level = waiter.line
        own = self._lines[waiter.line].position(waiter)
        others = 0
        for (name, other), line in self._lines.items():
            if other > level:
                others += len(line)
            elif other == level and name != tenant:
                others += min(len(line), own + 1)
        return own + others

    def last_refusable(self) -> Waiter | None:
        """Return the one to refuse when too many wait: the last of the tenant that would be served last, if it has had no
        token."""
        best: tuple[float, Waiter] | None = None
        for (tenant, _), line in self._lines.items():
            last = line.last_refusable()
            if last is None:
                continue
            end = self._counters.of(tenant) + sum(self._counters.prompt_charge(w.place) for w in line)
            if best is None or (-last.level, end) > (-best[1].level, best[0]):
                best = (end, last)
        return None if best is None else best[1]


class _Order:
    """The next waiter of each line, the first of all in front."""

    def __init__(self, gaps: ServiceGaps, now: float, aging_s: float) -> None:
        self._gaps, self._now, self._aging_s = gaps, now, aging_s
        self.heap: list[tuple[float, int, int, float, int, int, float, list[Waiter]]] = []

    def push(self, waiters: list[Waiter], index: int, counter: float, served_at: float) -> None:
        """Push a line's next waiter, if there is one. `served_at` is when one of the line was last placed."""
        if index >= len(waiters):
            return
        head, now = waiters[index], self._now
        level = float(head.level)
        if self._aging_s:
            level += (now - max(head.arrived_at, served_at)) // self._aging_s
        is_late = now > head.start_by and head.tuning.late_last
        turn = 2 if is_late else 1 if head.deferred else 0
        head.is_behind = self._gaps.is_behind(counter)
        ahead = self._gaps.num_ahead(counter)
        heappush(self.heap, (-level, ahead, turn, counter, head.number, index, served_at, waiters))


class _Line:
    """One tenant's waiters of one level: in time, deferred, late."""

    def __init__(self, served_at: float, *, late_last: bool) -> None:
        self.served_at, self._late_last = served_at, late_last
        """When one of them was last placed, or the line began."""
        self.timely: list[Waiter] = []
        self.deferred: list[Waiter] = []
        self.late: list[Waiter] = []

    def __len__(self) -> int:
        return len(self.timely) + len(self.deferred) + len(self.late)

    def __iter__(self) -> Iterator[Waiter]:
        yield from self.timely
        yield from self.deferred
        yield from self.late

    @property
    def _lists(self) -> tuple[list[Waiter], list[Waiter], list[Waiter]]:
        """The lists in the order in which they are tried, each sorted by rank."""
        return self.timely, self.deferred, self.late

    @property
    def weight(self) -> float:
        return weight(next(iter(self)).place)

    def work_s(self, beside_s: float) -> float:
        """Seconds that all waiters which may still be in time take."""
        return sum(waiter.work_s + beside_s for waiter in (*self.timely, *self.deferred))

    def add(self, waiter: Waiter) -> None:
        insort(self.timely, waiter, key=_rank)

    def remove(self, waiter: Waiter) -> None:
        index = self.position(waiter)
        for waiters in self._lists:
            if index < len(waiters):
                del waiters[index]
                return
            index -= len(waiters)

    def hopeful(self, now: float) -> list[Waiter]:
        """Yield those that may still be in time, deferred or not, in order."""
        self._note_late(now)
        return sorted(self.timely + self.deferred, key=_rank)

    def defer(self, given_up: Collection[str]) -> None:
        """Defer the waiters with these keys, and no others."""
        waiting = sorted(self.timely + self.deferred, key=_rank)
        for waiter in waiting:
            waiter.deferred = waiter.key in given_up
        self.timely = [waiter for waiter in waiting if not waiter.deferred]
        self.deferred = [waiter for waiter in waiting if waiter.deferred]

    def split(self, now: float) -> list[Waiter]:
        """Return all in order, after moving those that have become late."""
        self._note_late(now)
        return self.timely + self.deferred + self.late

    def position(self, waiter: Waiter) -> int:
        before = 0
        for waiters in self._lists:
            index = bisect_left(waiters, waiter.rank, key=_rank)
            if index < len(waiters) and waiters[index] is waiter:
                return before + index
            before += len(waiters)
        raise KeyError(waiter.key)

    def last_refusable(self) -> Waiter | None:
        """Return the last in order, among those that are late or deferred if there are any."""
        for waiters in (self.late, self.deferred, self.timely):
            found = [w for w in waiters if w.place.attempt == 0]
            if found:
                return max(found, key=_rank)
        return None

    def _note_late(self, now: float) -> None:
        for waiters in (self.timely, self.deferred):
            while self._late_last and waiters and now > waiters[0].start_by:
                late = waiters[0]
                self.remove(late)
                insort(self.late, late, key=_rank)


def _shed(lines: list[_Line], num_instances: float, beside_s: float, now: float) -> None:
    """Choose anew which of one tenant's waiters are deferred: the dearest, as many as keep others from being in time. `lines`
    come with the highest level first."""
    waiting = [waiter for line in lines for waiter in line.hopeful(now)]
    given_up = {waiter.key for waiter in dearest(waiting, num_instances, beside_s, now)}
    for line in lines:
        line.defer(given_up)


def _level(line: tuple[str, int]) -> int:
    return line[1]


def _rank(waiter: Waiter) -> tuple[float, int]:
    return waiter.rank
