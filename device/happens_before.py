"""Which accesses to a device's memory are ordered, by vector clocks (as in FastTrack, Flanagan and Freund, 2009).

Actors are the host, all of its threads together, and each stream. Everything is decided as work is given, in its order, so a
missing wait is found whether or not it does harm this time."""

import numpy as np

_GRANULE = 4
"""Bytes that are judged together: no vector or scale is smaller."""


class VectorClock:
    """How much of each actor's work is over for the one that has this clock."""

    def __init__(self, actor: int) -> None:
        self.actor = actor
        self.ticks: dict[int, int] = {actor: 0}

    def tick(self) -> None:
        self.ticks[self.actor] += 1

    def join(self, ticks: dict[int, int]) -> None:
        for actor, tick in ticks.items():
            if tick > self.ticks.get(actor, 0):
                self.ticks[actor] = tick


class AccessLog:
    """When each actor last read and wrote each granule of one allocation, as far as nobody has written it since."""

    def __init__(self, num_bytes: int) -> None:
        self.num_granules = -(-num_bytes // _GRANULE)
        self.writes: dict[int, np.ndarray] = {}
        self.reads: dict[int, np.ndarray] = {}

    def read(self, start: int, num_bytes: int, clock: VectorClock) -> int | None:
        """Returns an actor whose writing of these bytes is not ordered before this."""
        span = _span(start, num_bytes)
        found = _unordered(self.writes, span, clock)
        self.marks_of(self.reads, clock.actor)[span] = clock.ticks[clock.actor]
        return found

    def write(self, start: int, num_bytes: int, clock: VectorClock) -> int | None:
        """Returns an actor whose reading or writing of these bytes is not ordered before this."""
        span = _span(start, num_bytes)
        found = _unordered(self.writes, span, clock)
        if found is None:
            found = _unordered(self.reads, span, clock)
        for marks in (*self.writes.values(), *self.reads.values()):
            marks[span] = 0
        self.marks_of(self.writes, clock.actor)[span] = clock.ticks[clock.actor]
        return found

    def marks_of(self, marks: dict[int, np.ndarray], actor: int) -> np.ndarray:
        """Return an actor's own among the `reads` or the `writes`."""
        if actor not in marks:
            marks[actor] = np.zeros(self.num_granules, np.int32)
        return marks[actor]


def _span(start: int, num_bytes: int) -> slice:
    return slice(start // _GRANULE, -(-(start + num_bytes) // _GRANULE))


def _unordered(marks: dict[int, np.ndarray], span: slice, clock: VectorClock) -> int | None:
    for actor, ticks in marks.items():
        if (ticks[span] > clock.ticks.get(actor, 0)).any():
            return actor
    return None
