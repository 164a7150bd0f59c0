"""How fast one instance writes to another: a latency and bytes per second, learned from the writes themselves.

A line is fitted through (bytes, seconds), in which each write weighs a little less with each that follows. So tiny writes teach
the latency and leave the rate alone. Invariant: an estimate never promises more than the write under way has shown to be
impossible."""

from dataclasses import dataclass, field
from math import inf

_KEPT = 0.9
"""The weight that an observation keeps with each that follows."""
_MOST_TIMES = 8.0
"""A write counts as at most this many times as long as was expected, or as writes are on average. One pause is no slow link;
several are."""
_SPREAD = 0.1
"""Where sizes differ by less than this (standard deviation by mean), they tell nothing of the latency."""


@dataclass(slots=True, eq=False)
class Write:
    """One write under way."""

    num_bytes: int
    began_s: float


@dataclass(slots=True)
class LinkRate:
    """Everything is told with the time at which it happens."""

    last_s: float = -inf
    """When the last write ended."""
    _under_way: list[Write] = field(default_factory=list[Write])
    _weight: float = 0.0
    _bytes: float = 0.0
    _seconds: float = 0.0
    _bytes_bytes: float = 0.0
    _bytes_seconds: float = 0.0

    def begin(self, num_bytes: int, now: float) -> Write:
        write = Write(max(1, num_bytes), now)
        self._under_way.append(write)
        return write

    def end(self, write: Write, now: float) -> None:
        """Learn from a write that is over. Writes overlap: it has had the link since the one before it ended."""
        self._under_way.remove(write)
        took_s = max(0.0, now - max(write.began_s, self.last_s))
        self.last_s = max(self.last_s, now)
        self.note(write.num_bytes, took_s)

    def drop(self, write: Write) -> None:
        """Learn nothing from a write that has failed."""
        self._under_way.remove(write)

    def idle_s(self, now: float) -> float:
        return 0.0 if self._under_way else now - self.last_s

    def note(self, num_bytes: int, took_s: float) -> None:
        """Learn that so many bytes have taken so long."""
        if self._weight:
            latency_s, s_per_byte = self._line()
            expected_s = max(latency_s + num_bytes * s_per_byte, self._seconds / self._weight)
            took_s = min(took_s, _MOST_TIMES * expected_s) if expected_s else took_s
        self._weight = _KEPT * self._weight + 1
        self._bytes = _KEPT * self._bytes + num_bytes
        self._seconds = _KEPT * self._seconds + took_s
        self._bytes_bytes = _KEPT * self._bytes_bytes + num_bytes * num_bytes
        self._bytes_seconds = _KEPT * self._bytes_seconds + num_bytes * took_s

    def estimate(self, now: float) -> tuple[float, float]:
        """Return (latency in seconds, seconds per byte); both 0 while nothing is known."""
        latency_s, s_per_byte = self._line() if self._weight else (0.0, 0.0)
        for write in self._under_way:
            elapsed_s = now - max(write.began_s, self.last_s)
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
