"""How fast one instance writes to another: a latency and bytes per second, learned from the writes themselves.

A line is fitted through (bytes, seconds), in which each write weighs a little less with each that follows. So tiny writes teach
the latency and leave the rate alone. Invariant: an estimate never promises more than the write under way has shown to be
impossible."""

from dataclasses import dataclass, field
from math import inf

from kvtransfer.transport.base import Carried

_KEPT = 0.9
"""The weight that an observation keeps with each that follows."""
_MOST_TIMES = 8.0
"""A write that takes more than this many times what was expected, and what writes take on average, has met a pause."""
_ONE_PAUSE_IN = 10
"""One pause in so many writes is no slow link and counts for nothing. After a second one both count, at the pace of the quicker:
a link may let the first bytes after a rest pass at once, and is as slow as its slow writes say all the same."""
_SPREAD = 0.1
"""Where sizes differ by less than this (standard deviation by mean), they tell nothing of the latency."""


@dataclass(slots=True, eq=False)
class Write:
    """One write under way."""

    num_bytes: int
    began_at: float


@dataclass(slots=True)
class LinkRate:
    """Everything is told with the time at which it happens."""

    last_at: float = -inf
    """When the last write ended."""
    _under_way: list[Write] = field(default_factory=list[Write])
    _weight: float = 0.0
    _bytes: float = 0.0
    _seconds: float = 0.0
    _bytes_bytes: float = 0.0
    _bytes_seconds: float = 0.0
    _pause: tuple[int, float] | None = None
    """The bytes and seconds of the last write that met a pause."""
    _num_since_pause: int = 0

    def begin(self, num_bytes: int, now: float) -> Write:
        write = Write(max(1, num_bytes), now)
        self._under_way.append(write)
        return write

    def end(self, write: Write, now: float, carried: Carried | None = None) -> None:
        """Learn from a write that is over. Writes overlap: it has had the link since the one before it ended. `carried` is what
        has arrived meanwhile, where writes end before their bytes are there."""
        self._under_way.remove(write)
        took_s = max(0.0, now - max(write.began_at, self.last_at))
        self.last_at = max(self.last_at, now)
        if carried is None:
            self.note(write.num_bytes, took_s)
        else:
            self.arrived(carried)

    def drop(self, write: Write) -> None:
        """Learn nothing from a write that has failed."""
        self._under_way.remove(write)

    def idle_s(self, now: float) -> float:
        return 0.0 if self._under_way else now - self.last_at

    def note(self, num_bytes: int, took_s: float) -> None:
        """Learn that so many bytes have taken so long."""
        self._num_since_pause += 1
        if self._is_pause(num_bytes, took_s):
            before = self._pause if self._num_since_pause <= _ONE_PAUSE_IN else None
            self._pause, self._num_since_pause = (num_bytes, took_s), 0
            if before is None:
                return
            before_bytes, before_s = before
            self._take(before_bytes, min(before_s, took_s * before_bytes / num_bytes))
            self._pause = None
        self._take(num_bytes, took_s)

    def arrived(self, carried: Carried) -> None:
        """Learn from what the system says has arrived. Its seconds are the network's, so there are no pauses of a process among
        them."""
        if carried.num_bytes:
            self._take(carried.num_bytes, carried.busy_s)

    def _is_pause(self, num_bytes: int, took_s: float) -> bool:
        if not self._weight:
            return False
        latency_s, s_per_byte = self._line()
        expected_s = max(latency_s + num_bytes * s_per_byte, self._seconds / self._weight)
        return took_s > _MOST_TIMES * expected_s > 0

    def _take(self, num_bytes: int, took_s: float) -> None:
        self._weight = _KEPT * self._weight + 1
        self._bytes = _KEPT * self._bytes + num_bytes
        self._seconds = _KEPT * self._seconds + took_s
        self._bytes_bytes = _KEPT * self._bytes_bytes + num_bytes * num_bytes
        self._bytes_seconds = _KEPT * self._bytes_seconds + num_bytes * took_s

    def estimate(self, now: float) -> tuple[float, float]:
        """Return (latency in seconds, seconds per byte); both 0 while nothing is known."""
        latency_s, s_per_byte = self._line() if self._weight else (0.0, 0.0)
        for write in self._under_way:
            elapsed_s = now - max(write.began_at, self.last_at)
            if elapsed_s > 2 * (latency_s + write.num_bytes * s_per_byte):
                s_per_byte = max(s_per_byte, elapsed_s / write.num_bytes)
        return latency_s, s_per_byte

    def _line(self) -> tuple[float, float]:
        mean_bytes, mean_s = self._bytes / self._weight, self._seconds / self._weight
        variance = self._bytes_bytes / self._weight - mean_bytes**2
        if variance <= (_SPREAD * mean_bytes) ** 2:
            return 0.0, mean_s / mean_bytes
        slope = (self._bytes_seconds / self._weight - mean_bytes * mean_s) / variance
        latency_s = mean_s - slope * mean_bytes
        if slope <= 0:
            return 0.0, mean_s / mean_bytes
        if latency_s < 0:
            return 0.0, self._bytes_seconds / self._bytes_bytes
        return latency_s, slope
