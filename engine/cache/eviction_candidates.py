"""The runs of a prefix cache whose last block may be given up, by the eviction policy's group.

Invariant: each run that may lose its last block has an entry in the heap of its group that says since when that block is idle.
Other entries are out of date, and dropped when they come first or are too many."""

import heapq
from collections.abc import Callable, Iterable

from engine.cache.prefix_run import Run

_FEW = 64
"""Entries out of date that a heap may have whatever the number of runs."""


class EvictionCandidates:
    def __init__(self, may_go: Callable[[Run], bool]) -> None:
        """`may_go`: whether a run's last block may be given up."""
        self._may_go = may_go
        self._heaps: dict[int, list[tuple[int, int, Run]]] = {}
        """By group: (idle since, number of the entry, run), the longest idle first."""
        self._num_added = 0

    def __len__(self) -> int:
        """Entries, with those that are out of date."""
        return sum(map(len, self._heaps.values()))

    @property
    def groups(self) -> Iterable[int]:
        """Those that have, or had, some."""
        return self._heaps

    def add(self, run: Run, num_runs: int) -> None:
        """Its last block may be given up from now on; the cache has `num_runs` runs."""
        heap = self._heaps.setdefault(run.group, [])
        if len(heap) > 2 * num_runs + _FEW:
            heap[:] = [entry for entry in heap if self._is_current(entry)]
            heapq.heapify(heap)
        self._num_added += 1
        heapq.heappush(heap, (run.idle_since, self._num_added, run))

    def first(self, group: int) -> Run | None:
        """The run of a group whose last block is idle for longest."""
        heap = self._heaps[group]
        while heap and not self._is_current(heap[0]):
            heapq.heappop(heap)
        return heap[0][2] if heap else None

    def _is_current(self, entry: tuple[int, int, Run]) -> bool:
        """A run that falls idle anew, perhaps in another group, does so at another time."""
        idle_since, _, run = entry
        return run.idle_since == idle_since and self._may_go(run)
