"""Which requests to give up so that as many others as possible are in time.

This is Moore's and Hodgson's rule (Moore, "An n job, one machine sequencing algorithm for minimizing the number of late jobs",
Management Science 15, 1968): take jobs by deadline; whenever one would be late, give up the dearest of those taken so far. It is
optimal on one machine. Here the instances that compute prompts count as one machine that is as quick as all of them. Jobs come in
while it runs, so what was given up is only tried later than the others, and chosen anew before long."""

from collections.abc import Iterable
from heapq import heappop, heappush
from math import isinf
from typing import Protocol, TypeVar

from core.scheduler_tuning import DEFAULT_TUNING, SchedulerTuning


class Timed(Protocol):
    """A request that waits (cluster.scheduler.queue.waiting_queue.Waiter)."""

    @property
    def work_s(self) -> float: ...
    @property
    def start_by(self) -> float: ...
    @property
    def level(self) -> int: ...
    @property
    def number(self) -> int: ...


T = TypeVar("T", bound=Timed)


def dearest(waiters: Iterable[T], num_instances: float, beside_s: float, now: float) -> list[T]:
    """Return the waiters to give up: the lowest level first, none without a deadline. `waiters` come in their order of service.
    Each takes `work_s + beside_s` of one of `num_instances`."""
    given_up: list[T] = []
    taken: list[tuple[int, float, int, T]] = []
    begin_at = now
    for waiter in waiters:
        if not isinf(waiter.start_by):
            heappush(taken, (waiter.level, -waiter.work_s, waiter.number, waiter))
        late = begin_at > waiter.start_by
        begin_at += (waiter.work_s + beside_s) / num_instances
        if late:
            given_up.append(heappop(taken)[3])
            begin_at -= (given_up[-1].work_s + beside_s) / num_instances
    return given_up


class Spending:
    """What a request takes of the fleet's time beside its prompt: its decoding, for the most part.

    It is learned while requests wait, since then all of the fleet's time goes to those that are placed."""

    def __init__(self, tuning: SchedulerTuning = DEFAULT_TUNING) -> None:
        self._tuning = tuning
        self._waiting_since: float | None = None
        self._fleet_s = self._work_s = self._num_placed = 0.0

    @property
    def beside_s(self) -> float:
        """The seconds of one instance that a request takes beside its prompt; 0 while too little is known."""
        if self._num_placed < self._tuning.num_learned:
            return 0.0
        return max(0.0, self._fleet_s - self._work_s) / self._num_placed

    def observe(self, num_instances: float, now: float, *, some_wait: bool) -> None:
        """Learn that `num_instances` have worked for what was placed since the last call, if any waited then."""
        if self._waiting_since is not None:
            self._fleet_s += num_instances * (now - self._waiting_since)
        self._waiting_since = now if some_wait else None
        if self._fleet_s > self._tuning.remembered_s * num_instances:
            self._fleet_s, self._work_s, self._num_placed = (
                self._fleet_s / 2,
                self._work_s / 2,
                self._num_placed / 2,
            )

    def placed(self, work_s: float) -> None:
        if self._waiting_since is not None:
            self._work_s += work_s
            self._num_placed += 1
