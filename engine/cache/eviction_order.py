"""Which idle block of a prefix cache is given up first: the least recently used one, after those that nobody will ask for and
before those that are pinned.

Time is counted in blocks that fell idle. Invariant: each run that may lose its last block has an entry in the heap, ordered by
when that block fell idle. Other entries are out of date; they are dropped when they come first or become too many."""

import heapq
from collections.abc import Collection

from engine.cache.block_pool import BlockPool
from engine.cache.prefix_run import Run

_Entry = tuple[float, bool, int, int, Run]
"""(pinned until, wanted, idle since, number of the entry, run)"""
_FEW = 64
"""The number of outdated entries that the heap may have however few runs there are."""


class EvictionOrder:
    def __init__(self, pool: BlockPool, runs: Collection[Run]) -> None:
        """`runs` is a live view of the cache's runs."""
        self._pool, self._runs = pool, runs
        self._entries: list[_Entry] = []
        """The first to go is at the top."""
        self._num_added = self._num_released = 0

    @property
    def num_entries(self) -> int:
        """The number of entries, outdated ones included."""
        return len(self._entries)

    def fell_idle(self, run: Run, *, wanted: bool) -> None:
        """Note that all blocks of `run` fell idle, the last one first. Unless they are `wanted` their client has said that nobody
        will ask for them again."""
        run.wanted, run.idle_since = wanted, self._num_released
        self._num_released += len(run.blocks)
        self.offer(run)

    def offer(self, run: Run) -> None:
        """Add `run` if its last block may be given up now. Also call it when its pins have changed, or whether it is wanted."""
        if not self._may_go(run):
            return
        if len(self._entries) > 2 * len(self._runs) + _FEW:
            self._entries = [entry for entry in self._entries if self._is_current(entry)]
            heapq.heapify(self._entries)
        self._num_added += 1
        heapq.heappush(self._entries, _entry(run, self._num_added))

    def first(self) -> Run | None:
        """Return the run whose last block goes first; None where no run's may go."""
        while self._entries and not self._is_current(self._entries[0]):
            heapq.heappop(self._entries)
        return self._entries[0][-1] if self._entries else None

    def num_to_go(self, run: Run, most: int) -> int:
        """Return how many of the first run's last blocks, at `most`, go before any other run's: those that are idle fell idle one
        after another."""
        refs, blocks = self._pool.refs, run.blocks
        most = min(most, len(blocks))
        if not refs(blocks[-most]):
            return most
        return next(count for count in range(1, most) if refs(blocks[-1 - count]))

    def num_idle(self, run: Run) -> int:
        """Return the number of blocks that nobody refers to. They are the last ones, and mostly all or none."""
        refs, blocks = self._pool.refs, run.blocks
        if not refs(blocks[0]):
            return len(blocks)
        return 0 if refs(blocks[-1]) else sum(refs(block) == 0 for block in blocks)

    def _may_go(self, run: Run) -> bool:
        """Return whether the last block may be given up: nothing follows it, and nobody refers to it."""
        return len(run.blocks) > 0 and not run.children and not self._pool.refs(run.blocks[-1])

    def _is_current(self, entry: _Entry) -> bool:
        """Return whether an entry is up to date. A run that falls idle anew does so at a later time."""
        ends_at, wanted, idle_since, _, run = entry
        if run.idle_since != idle_since or run.wanted != wanted or not self._may_go(run):
            return False
        return run.pinned_until == ends_at


def _entry(run: Run, number: int) -> _Entry:
    return run.pinned_until, run.wanted, run.idle_since, number, run
