"""Which idle blocks of a prefix cache are given up first, and what is learned from those that were.

Time is counted in blocks that fell idle. Invariant: the policy names a run's group when the run falls idle, and the group stays
until the run falls idle again."""

import math
from collections.abc import Collection, Sequence

import numpy as np

from engine.cache.block_pool import BlockPool
from engine.cache.eviction_candidates import EvictionCandidates
from engine.cache.eviction_policy import Eviction
from engine.cache.ghosts import Ghost, Ghosts, counted_up
from engine.cache.prefix_run import Run

_MIN_LESSON = 256
"""The fewest blocks that fall idle between two lessons of the eviction policy. A larger pool waits for as many as it has."""
_GHOSTS = 8
"""Given-up blocks are remembered up to so many times the pool's size, since a policy also learns from blocks wanted too late."""
_UNWANTED = -1
"""The group of blocks whose client has said that nobody will ask for them again."""


class Retention:
    def __init__(self, eviction: Eviction, pool: BlockPool, runs: Collection[Run]) -> None:
        """`runs` is the cache's own collection, which changes as the cache does."""
        self._eviction, self._pool, self._runs = eviction, pool, runs
        self._candidates = EvictionCandidates(self._may_go)
        self._ghosts = Ghosts(_GHOSTS * pool.num_blocks)
        self._num_released = 0
        self._next_lesson = max(_MIN_LESSON, pool.num_blocks)

    @property
    def num_candidates(self) -> int:
        """The number of runs that may lose a block, outdated entries included."""
        return len(self._candidates)

    def used(self, run: Run) -> None:
        """Learn that a sequence is about to refer to `run`. Its reference is not counted yet."""
        idle_since = run.idle_since + len(run.blocks)
        for block in run.blocks:
            idle_since -= 1
            if not self._pool.refs(block):
                self._reused(run.group, idle_since)

    def wanted_again(self, hashes: Sequence[int]) -> list[int]:
        """Learn that blocks which follow each other are kept again. Return how often the first ones, which had been given up,
        have been used by now. Nothing is known of the blocks behind those."""
        ghosts = self._ghosts.recall(hashes)
        for ghost in ghosts:
            self._reused(ghost.group, ghost.idle_since)
        return [ghost.uses + 1 for ghost in ghosts]

    def fell_idle(self, run: Run, num_tokens: int, priority: int, wanted: bool) -> None:
        """Note that all blocks of `run` fell idle, the last one first. The sequence that had them last has `num_tokens`."""
        run.group = self._eviction.group(run.uses, num_tokens, priority) if wanted else _UNWANTED
        run.idle_since = self._num_released
        self._num_released += len(run.blocks)
        self.offer(run)

    def offer(self, run: Run) -> None:
        """Make the run a candidate if its last block may be given up now."""
        if self._may_go(run):
            self._candidates.add(run, len(self._runs))

    def given_up(self, run: Run, count: int) -> None:
        """Remember the run's last `count` blocks, which are about to be given up."""
        if self._eviction.learns:
            assert run.parent is not None
            left = len(run.blocks) - count
            before = run.hashes[left - 1] if left else run.parent.hashes[-1]
            ghost = Ghost(run.group, run.idle_since, run.uses)
            self._ghosts.remember(run.hashes[: -count - 1 : -1], before, ghost)

    def learn(self) -> None:
        """Give the policy its lesson if it is due."""
        if not self._eviction.learns or self._num_released < self._next_lesson:
            return
        self._next_lesson = self._num_released + max(_MIN_LESSON, self._pool.num_blocks)
        counts = np.array([self.num_idle(run) for run in self._runs], np.int64)
        groups = np.array([run.group for run in self._runs], np.int64)
        since = np.array([run.idle_since for run in self._runs], np.int64)
        given_up, times = self._ghosts.groups_and_times()
        groups = np.concatenate((np.repeat(groups, counts), given_up))
        times = np.concatenate((counted_up(since, counts), times))
        wanted = groups != _UNWANTED
        self._eviction.learn(groups[wanted], self._num_released - times[wanted])

    def least(self) -> tuple[int, float]:
        """Return the group to take from, and the value up to which its blocks may go before another group is better."""
        least, best, limit = -1, math.inf, math.inf
        for group in self._candidates.groups:
            run = self._candidates.first(group)
            if run is None:
                continue
            value = self._value(group, run.idle_since)
            if value < best or (value == best and group < least):
                least, best, limit = group, value, best
            elif value < limit:
                limit = value
        return least, limit

    def first(self, group: int, limit: float) -> Run | None:
        """Return the group's run to take from next, or None when none is worth so little."""
        run = self._candidates.first(group)
        return run if run is not None and self._value(group, run.idle_since) <= limit else None

    def num_to_go(self, run: Run, most: int, limit: float) -> int:
        """Return how many of the run's last blocks may go. The first one that goes is known to be idle and worth little
        enough."""
        blocks, count = run.blocks, 1
        most = min(most, len(blocks))
        while (
            count < most
            and not self._pool.refs(blocks[-1 - count])
            and self._value(run.group, run.idle_since + count) <= limit
        ):
            count += 1
        return count

    def num_idle(self, run: Run) -> int:
        """Return the number of blocks that nobody refers to: mostly all, or none."""
        refs, blocks = self._pool.refs, run.blocks
        if not refs(blocks[0]):
            return len(blocks)
        return 0 if refs(blocks[-1]) else sum(refs(block) == 0 for block in blocks)

    def _may_go(self, run: Run) -> bool:
        """Return whether the run's last block may go: nothing follows it, and nobody refers to it."""
        return len(run.blocks) > 0 and not run.children and not self._pool.refs(run.blocks[-1])

    def _value(self, group: int, idle_since: int) -> float:
        if group == _UNWANTED:
            return -math.inf
        return self._eviction.value(group, self._num_released - idle_since)

    def _reused(self, group: int, idle_since: int) -> None:
        if self._eviction.learns and group != _UNWANTED:
            self._eviction.reused(group, self._num_released - idle_since)
