"""Requests that wait for a place, and the order in which they are tried.

- Among tenants of one level, the one that has had the least service by its weight goes first (`fairness`).
- A level is a class's priority; a tenant that has not been served for AGING_S ranks one level higher for each time that long, so
  nobody starves. A request that goes on after a lost instance ranks one level higher: its client is mid-stream.
- Within a tenant, by deadline: a level is worth AGING_S of it, so a request waits at most AGING_S for each level of difference
  for those that come after it.
- A request that can no longer begin in time is tried after all that still can: serving it first would make others late as well.
- Where a tenant's share of the fleet is too small for what waits, its dearest prompts are set aside (`overload`) and
  tried between those two: so that as many requests as can be are in time.

Invariant: every waiter is in exactly one list of its tenant."""

from bisect import bisect_left, insort
from collections.abc import Iterator
from heapq import heappop, heappush
from math import inf
from typing import Final

from cluster.scheduler.fleet.member import Member
from cluster.scheduler.queue.fairness import ServiceCounters, weight
from cluster.scheduler.queue.overload import Spending, dearest
from core.messages import Place

AGING_S: Final = 10.0
_SHED_EVERY_S: Final = 0.05
_SURE_SHARE: Final = 0.9
"""Of what requests seem to take: who is set aside a little late is chosen among more, who is set aside in vain may be lost."""


class Waiter:
    """One request in the queue."""

    __slots__ = (
        "arrived_at",
        "blocked_since",
        "deferred",
        "due_at",
        "frontend",
        "key",
        "level",
        "num_tries",
        "number",
        "place",
        "rank",
        "start_by",
        "tried_at",
        "waits_for",
        "work_s",
    )  # fmt: skip

    def __init__(
        self,
        key: str,
        frontend: str,
        place: Place,
        arrived_at: float,
        *,
        number: int,
        start_by: float = inf,
        due_at: float = inf,
        work_s: float = 0.0,
    ) -> None:
        """`start_by`: begun later, it misses its time to the first token, which is due at `due_at`; `work_s`: what its prompt
        takes at the least."""
        self.key, self.frontend, self.place = key, frontend, place
        self.arrived_at, self.number = arrived_at, number
        self.start_by, self.due_at, self.work_s = start_by, due_at, work_s
        self.blocked_since: float | None = None
        """Since when no decode instance has had headroom for it; None: it was not tried, or it had."""
        self.deferred = False
        """Too dear for what its tenant's share of the fleet can do in time, as things stand."""
        self.num_tries = 0
        self.tried_at = -inf
        """When it last found no place."""
        self.waits_for: tuple[Member, int] | None = None
        """The instance that was best then but had too many prompts before it, and the version that it had."""
        slo = place.slo
        self.level = slo.priority + (1 if place.attempt else 0)
        self.rank = ((arrived_at + min(slo.ttft_s, AGING_S)) / AGING_S - self.level, number)


class WaitingQueue:
    def __init__(self, counters: ServiceCounters | None = None) -> None:
        self._counters = counters or ServiceCounters()
        self._by_key: dict[str, Waiter] = {}
        self._tenants: dict[str, _Line] = {}
        """Of those with somebody waiting."""
        self._spending = Spending()
        self._shed_at = -inf

    def __len__(self) -> int:
        return len(self._by_key)

    def __iter__(self) -> Iterator[Waiter]:
        """In no particular order."""
        return iter(list(self._by_key.values()))

    def get(self, key: str) -> Waiter | None:
        return self._by_key.get(key)

    def has_timely(self) -> bool:
        """Do some wait that can still be in time, as seen when they were last tried?"""
        return any(line.timely for line in self._tenants.values())

    def add(self, waiter: Waiter) -> None:
        place = waiter.place
        line = self._tenants.get(place.tenant)
        if line is None:
            self._counters.raise_floor(place.tenant, self._tenants)
            line = self._tenants[place.tenant] = _Line(waiter.arrived_at)
        line.add(waiter)
        self._by_key[waiter.key] = waiter

    def shed(self, num_instances: float, now: float) -> None:
        """Set aside what keeps others from being in time on so many instances, which the tenants share by weight."""
        self._spending.observe(bool(self._by_key), num_instances, now)
        if now < self._shed_at or not self._by_key:
            return
        self._shed_at = now + _SHED_EVERY_S
        beside_s = self._spending.beside_s
        work = {tenant: line.work_s(beside_s) / line.weight for tenant, line in self._tenants.items()}
        weights = self._counters.weighted(work)
        shares = {tenant: line.weight * weights[tenant] for tenant, line in self._tenants.items()}
        total = sum(shares.values())
        for tenant, line in self._tenants.items():
            line.shed(num_instances / _SURE_SHARE * shares[tenant] / total, beside_s, now)

    def remove(self, waiter: Waiter) -> None:
        """It is answered, or withdrawn."""
        del self._by_key[waiter.key]
        line = self._tenants[waiter.place.tenant]
        line.remove(waiter)
        if not len(line):
            del self._tenants[waiter.place.tenant]

    def served(self, waiter: Waiter, now: float) -> None:
        """It is removed, because it was placed."""
        if (line := self._tenants.get(waiter.place.tenant)) is not None:
            line.served_at = now
        self._spending.placed(waiter.work_s)
        self.remove(waiter)

    def in_order(self, now: float) -> Iterator[Waiter]:
        """All, as they should be tried now; what is yielded may be removed meanwhile.

        The order among tenants takes what is yielded as served, so that no tenant's line hides the others'."""
        lines = [(tenant, line.split(now)) for tenant, line in self._tenants.items()]
        if len(lines) == 1:
            yield from lines[0][1]
            return
        heap: list[tuple[int, float, float, int, int, str, list[Waiter]]] = []
        for tenant, waiters in lines:
            self._push(heap, tenant, waiters, 0, self._counters.of(tenant), now)
        while heap:
            _, _, counter, _, index, tenant, waiters = heappop(heap)
            waiter = waiters[index]
            yield waiter
            counter += self._counters.prompt_charge(waiter.place)
            self._push(heap, tenant, waiters, index + 1, counter, now)

    def num_ahead(self, waiter: Waiter) -> int:
        """About how many are served before it: its own line's, and as many of each other tenant's by weight."""
        tenant = waiter.place.tenant
        own = self._tenants[tenant].position(waiter)
        others = sum(min(len(line), own + 1) for name, line in self._tenants.items() if name != tenant)
        return own + others

    def last_refusable(self) -> Waiter | None:
        """The one to refuse when too many wait: the last of the tenant that would be served last, if it has had no token."""
        best: tuple[float, Waiter] | None = None
        for tenant, line in self._tenants.items():
            last = line.last_refusable()
            if last is None:
                continue
            end = self._counters.of(tenant) + sum(self._counters.prompt_charge(w.place) for w in line)
            if best is None or (-last.level, end) > (-best[1].level, best[0]):
                best = (end, last)
        return None if best is None else best[1]

    def _push(
        self,
        heap: list[tuple[int, float, float, int, int, str, list[Waiter]]],
        tenant: str,
        waiters: list[Waiter],
        index: int,
        counter: float,
        now: float,
    ) -> None:
        if index >= len(waiters):
            return
        head = waiters[index]
        starved_s = now - max(head.arrived_at, self._tenants[tenant].served_at)
        level = head.level + starved_s // AGING_S
        turn = 2 if now > head.start_by else 1 if head.deferred else 0
        heappush(heap, (turn, -level, counter, head.number, index, tenant, waiters))


class _Line:
    """One tenant's waiters: in time, set aside, late."""

    def __init__(self, served_at: float) -> None:
        self.served_at = served_at
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
        """In the order in which they are tried, each by rank."""
        return self.timely, self.deferred, self.late

    @property
    def weight(self) -> float:
        return weight(next(iter(self)).place)

    def work_s(self, beside_s: float) -> float:
        """Of what may still be in time."""
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

    def shed(self, num_instances: float, beside_s: float, now: float) -> None:
        """Choose anew which are set aside: the dearest, as many as keep others from being in time on so many instances."""
        self._note_late(now)
        waiting = sorted(self.timely + self.deferred, key=_rank)
        given_up = {waiter.key for waiter in dearest(waiting, num_instances, beside_s, now)}
        for waiter in waiting:
            waiter.deferred = waiter.key in given_up
        self.timely = [waiter for waiter in waiting if not waiter.deferred]
        self.deferred = [waiter for waiter in waiting if waiter.deferred]

    def split(self, now: float) -> list[Waiter]:
        """All in order, after those that have become late were moved."""
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
        """The last in order: of those that are late already or set aside, if there are any."""
        for waiters in (self.late, self.deferred, self.timely):
            found = [w for w in waiters if w.place.attempt == 0]
            if found:
                return max(found, key=_rank)
        return None

    def _note_late(self, now: float) -> None:
        for waiters in (self.timely, self.deferred):
            while waiters and now > waiters[0].start_by:
                late = waiters[0]
                self.remove(late)
                insort(self.late, late, key=_rank)


def _rank(waiter: Waiter) -> tuple[float, int]:
    return waiter.rank
