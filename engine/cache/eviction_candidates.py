"""The runs of a prefix cache whose last block may be given up, by the eviction policy's group.

Invariant: each run that may lose its last block has an entry in its group's heap, ordered by when that block fell idle. Other
entries are out of date; they are dropped when they come first or become too many."""

import heapq
from collections.abc import Callable, Iterable

from engine.cache.prefix_run import Run

_FEW = 64
"""The number of outdated entries that a heap may have however few runs there are."""


class EvictionCandidates:
    def __init__(self, may_go: Callable[[Run], bool]) -> None:
        """`may_go` says whether a run's last block may be given up."""
        self._may_go = may_go
        self._heaps: dict[int, list[tuple[int, int, Run]]] = {}
        """By group: (idle since, number of the entry, run), the longest idle first."""
        self._num_added = 0

    def __len__(self) -> int:
        """Return the number of entries, outdated ones included."""
        return sum(map(len, self._heaps.values()))

    @property
    def groups(self) -> Iterable[int]:
        """The groups that have, or had, candidates."""
        return self._heaps

    def add(self, run: Run, num_runs: int) -> None:
        """Add a run whose last block may be given up from now on. The cache has `num_runs` runs."""
        heap = self._heaps.setdefault(run.group, [])
        if len(heap) > 2 * num_runs + _FEW:
            heap[:] = [entry for entry in heap if self._is_current(entry)]
            heapq.heapify(heap)
        self._num_added += 1
        heapq.heappush(heap, (run.idle_since, self._num_added, run))

    def first(self, group: int) -> Run | None:
        """Return the group's run whose last block has been idle for longest."""
        heap = self._heaps[group]
        while heap and not self._is_current(heap[0]):
            heapq.heappop(heap)
        return heap[0][2] if heap else None

    def _is_current(self, entry: tuple[int, int, Run]) -> bool:
        """Return whether an entry is up to date. A run that falls idle anew does so at a later time."""
        idle_since, _, run = entry
        return run.idle_since == idle_since and self._may_go(run)
