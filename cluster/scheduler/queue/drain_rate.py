"""How fast requests leave the queue, and so how long one would wait."""

from collections import deque
from math import ceil
from typing import Final

from core.scheduler_tuning import SchedulerTuning

_UNKNOWN_RETRY_S: Final = 5.0
_MAX_RETRY_S: Final = 60.0


class DrainRate:
    """How many requests per second leave the queue for an instance, measured only while some wait.

    (While nothing waits, requests leave as fast as they come, which says nothing about capacity.)"""

    def __init__(self, tuning: SchedulerTuning) -> None:
        self._tuning = tuning
        self._waiting_since: float | None = None
        self._left: deque[float] = deque()
        self._last: tuple[float, float] | None = None
        """(rate of the last time that requests waited, when that was)."""

    def observe(self, num_waiting: int, num_left: int, now: float) -> None:
        """Note, after each event, how many wait now and how many were just placed."""
        if self._waiting_since is None:
            self._waiting_since = now if num_waiting else None
            return
        self._left.extend([now] * num_left)
        while self._left and self._left[0] < now - self._tuning.drain_window_s:
            self._left.popleft()
        if not num_waiting:
            if (rate := self._measured_per_s(now)) is not None:
                self._last = (rate, now)
            self._waiting_since = None
            self._left.clear()

    def per_s(self, now: float) -> float | None:
        """The rate, or None when nothing recent is known."""
        if (rate := self._measured_per_s(now)) is not None:
            return rate
        if self._last is None or now - self._last[1] >= self._tuning.drain_known_s:
            return None
        return self._last[0]

    def wait_s(self, num_ahead: int, now: float) -> float:
        """Return how long a request with `num_ahead` before it will wait; 0 when nothing is known."""
        rate = self.per_s(now)
        return num_ahead / rate if rate else 0.0

    def retry_after_s(self, num_waiting: int, max_waiting: int, max_wait_s: float, now: float) -> float:
        """Return when to come back, in whole seconds from 1 to 60: once the queue is half as long as the longest that is
        accepted."""
        rate = self.per_s(now)
        if not rate:
            return _UNKNOWN_RETRY_S
        longest = min(max_waiting, rate * max_wait_s)
        return min(max(1.0, float(ceil((num_waiting - longest / 2) / rate))), _MAX_RETRY_S)

    def _measured_per_s(self, now: float) -> float | None:
        if self._waiting_since is None or not self._left:
            return None
        elapsed_s = min(now - self._waiting_since, self._tuning.drain_window_s)
        return len(self._left) / elapsed_s if elapsed_s >= self._tuning.drain_least_s else None
