"""Requests that wait for a place: their order, and how fast they leave. Pure.

Order: a priority level is worth AGING_S of waiting, so a request waits at most AGING_S per level of difference for
those that come after it. A request that goes on after a lost instance ranks one level higher: its client is mid-stream."""

from bisect import insort
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from math import ceil

from core.messages import Place

AGING_S = 10.0
_MIN_MEASURED_S = 3.0
_WINDOW_S = 30.0
_REMEMBER_S = 60.0
_UNKNOWN_RETRY_S = 5.0
_MAX_RETRY_S = 60.0


@dataclass(slots=True, eq=False)
class Waiter:
    """One request in the queue."""

    key: str
    frontend: str
    place: Place
    arrived_s: float
    number: int
    blocked_since_s: float | None = None
    """Since when no decode instance has had headroom for it; None: it was not tried, or it had."""
    rank: tuple[float, int] = field(init=False)

    def __post_init__(self) -> None:
        level = self.place.slo.priority + (1 if self.place.attempt else 0)
        self.rank = (self.arrived_s / AGING_S - level, self.number)


class WaitingQueue:
    """Waiters in order of rank, and by key."""

    def __init__(self) -> None:
        self._ordered: list[Waiter] = []
        self._by_key: dict[str, Waiter] = {}

    def __len__(self) -> int:
        return len(self._ordered)

    def __iter__(self) -> Iterator[Waiter]:
        return iter(self._ordered)

    def __getitem__(self, position: int) -> Waiter:
        return self._ordered[position]

    def get(self, key: str) -> Waiter | None:
        return self._by_key.get(key)

    def position(self, waiter: Waiter) -> int:
        return self._ordered.index(waiter)

    def add(self, waiter: Waiter) -> None:
        insort(self._ordered, waiter, key=lambda w: w.rank)
        self._by_key[waiter.key] = waiter

    def remove(self, waiter: Waiter) -> None:
        self._ordered.remove(waiter)
        del self._by_key[waiter.key]

    def last_refusable(self) -> Waiter | None:
        """The one to refuse when there are too many: the last that no client has had tokens from."""
        return next((w for w in reversed(self._ordered) if w.place.attempt == 0), None)


class DrainRate:
    """How many requests per second leave the queue for an instance, measured only while some wait.

    (While nothing waits, requests leave as fast as they come, which says nothing about capacity.)"""

    def __init__(self) -> None:
        self._waiting_since_s: float | None = None
        self._left: deque[float] = deque()
        self._last: tuple[float, float] | None = None
        """(rate of the last time that requests waited, when that was)"""

    def observe(self, num_waiting: int, num_left: int, now: float) -> None:
        """After each event: how many wait now and how many were just placed."""
        if self._waiting_since_s is None:
            self._waiting_since_s = now if num_waiting else None
            return
        self._left.extend([now] * num_left)
        while self._left and self._left[0] < now - _WINDOW_S:
            self._left.popleft()
        if not num_waiting:
            if (rate := self._measured_per_s(now)) is not None:
                self._last = (rate, now)
            self._waiting_since_s = None
            self._left.clear()

    def per_s(self, now: float) -> float | None:
        """None when nothing recent is known."""
        if (rate := self._measured_per_s(now)) is not None:
            return rate
        return self._last[0] if self._last is not None and now - self._last[1] < _REMEMBER_S else None

    def wait_s(self, num_ahead: int, now: float) -> float:
        """How long a request with `num_ahead` before it will wait; 0 when nothing is known."""
        rate = self.per_s(now)
        return num_ahead / rate if rate else 0.0

    def retry_after_s(self, num_waiting: int, max_waiting: int, max_wait_s: float, now: float) -> float:
        """When to come back: once the queue is half as long as the longest that is accepted. Whole seconds, 1 to 60."""
        rate = self.per_s(now)
        if not rate:
            return _UNKNOWN_RETRY_S
        longest = min(max_waiting, rate * max_wait_s)
        return min(max(1.0, float(ceil((num_waiting - longest / 2) / rate))), _MAX_RETRY_S)

    def _measured_per_s(self, now: float) -> float | None:
        if self._waiting_since_s is None or not self._left:
            return None
        elapsed_s = min(now - self._waiting_since_s, _WINDOW_S)
        return len(self._left) / elapsed_s if elapsed_s >= _MIN_MEASURED_S else None
