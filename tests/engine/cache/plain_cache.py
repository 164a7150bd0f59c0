"""The prefix cache block by block: what `radix_cache.RadixCache` has to do, without runs, chunks and heaps.

Each step looks at everything that is kept. Eviction's memory is an ordered dictionary."""

import math
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from core.kv import block_hashes
from engine.cache.block_pool import BlockPool
from engine.cache.eviction_policy import Eviction
from engine.cache.ghosts import Ghost

UNWANTED = -1


@dataclass(eq=False, kw_only=True)
class Node:
    path: tuple[int, ...]
    """All tokens up to its last."""
    block: int
    hash: int
    uses: int
    idle_since: int = 0
    group: int = 0


class PlainCache:
    def __init__(self, pool: BlockPool, block_size: int, eviction: Eviction) -> None:
        self._pool, self._size, self._eviction = pool, block_size, eviction
        self._nodes: dict[tuple[int, ...], Node] = {}
        self._ghosts = OrderedDict[int, Ghost]()
        self._limit = 8 * pool.num_blocks
        self._num_released = 0
        self._next_lesson = max(256, pool.num_blocks)
        self.events: tuple[set[int], set[int]] = (set(), set())

    def match(self, tokens: Sequence[int]) -> tuple[int, ...]:
        ends = range(self._size, len(tokens), self._size)
        found = [self._nodes.get(tuple(tokens[:end])) for end in ends]
        known = found[: next((i for i, node in enumerate(found) if node is None), len(found))]
        return tuple(node.block for node in known if node is not None)

    def next_block(self, tokens: Sequence[int], num_matched: int) -> int:
        """Leading tokens that some block behind a match shares with what follows there, but for the last token."""
        start = num_matched * self._size
        wanted = tuple(tokens[start : min(start + self._size, len(tokens) - 1)])
        behind = [node.path[start:] for node in self._children(tuple(tokens[:start]))]
        return max(
            (n for own in behind for n in range(1, len(wanted) + 1) if own[:n] == wanted[:n]), default=0
        )

    def use(self, blocks: Sequence[int]) -> None:
        for block in blocks:
            node = self._with(block)
            node.uses += 1
            if not self._pool.refs(block):
                self._reused(node.group, node.idle_since)

    def insert(
        self, tokens: Sequence[int], num_full: int, blocks: Sequence[int], num_known: int
    ) -> list[int]:
        hashes = block_hashes(tokens, self._size)
        twins: list[int] = []
        for index in range(num_known, num_full):
            path = tuple(tokens[: (index + 1) * self._size])
            node = self._nodes.get(path)
            if node is None:
                node = Node(
                    path=path,
                    block=blocks[index],
                    hash=hashes[index],
                    uses=self._uses(hashes[index], path[: -self._size]),
                )
                self._nodes[path] = node
                self._pool.keep([node.block])
                self._note(node.hash, 0)
            elif node.block != blocks[index]:
                twins.append(node.block)
        return twins

    def release(self, blocks: Sequence[int], priority: int, wanted: bool) -> None:
        nodes = [self._with(block) for block in blocks]
        longest = max((len(node.path) for node in nodes), default=0)
        shared = max((len(node.path) for node in nodes if len(self._children(node.path)) > 1), default=0)
        for node in nodes:
            is_wanted = wanted or len(node.path) <= shared
            node.group = self._eviction.group(node.uses, longest, priority) if is_wanted else UNWANTED
            node.idle_since = self._num_released
            self._num_released += 1
        if self._num_released >= self._next_lesson:
            self._next_lesson = self._num_released + max(256, self._pool.num_blocks)
            self._learn()

    def evict(self, count: int) -> None:
        while count:
            oldest: dict[int, Node] = {}
            for node in self._leaves():
                oldest[node.group] = min(oldest.get(node.group, node), node, key=lambda n: n.idle_since)
            values = sorted((self._value(node), group) for group, node in oldest.items())
            limit = values[1][0] if len(values) > 1 else math.inf
            node = oldest[values[0][1]]
            while True:
                self._remove(node)
                count -= 1
                alike = [leaf for leaf in self._leaves() if leaf.group == node.group]
                if not count or not alike:
                    break
                node = min(alike, key=lambda n: n.idle_since)
                if self._value(node) > limit:
                    break

    def _with(self, block: int) -> Node:
        return next(node for node in self._nodes.values() if node.block == block)

    def _children(self, path: tuple[int, ...]) -> list[Node]:
        longer = len(path) + self._size
        return [n for p, n in self._nodes.items() if len(p) == longer and p[: len(path)] == path]

    def _leaves(self) -> list[Node]:
        return [
            node
            for path, node in self._nodes.items()
            if not self._children(path) and not self._pool.refs(node.block)
        ]

    def _uses(self, block_hash: int, before: tuple[int, ...]) -> int:
        ghost = self._ghosts.pop(block_hash, None)
        if ghost is not None:
            self._reused(ghost.group, ghost.idle_since)
            return ghost.uses + 1
        uses = self._nodes[before].uses if before else 1
        return max(1, uses // (1 + len(self._children(before))))

    def _remove(self, node: Node) -> None:
        self._ghosts[node.hash] = Ghost(node.group, node.idle_since, node.uses)
        if len(self._ghosts) > self._limit:
            self._ghosts.popitem(last=False)
        del self._nodes[node.path]
        self._pool.forget([node.block])
        self._note(node.hash, 1)

    def _note(self, block_hash: int, what: int) -> None:
        if block_hash in self.events[1 - what]:
            self.events[1 - what].remove(block_hash)
        else:
            self.events[what].add(block_hash)

    def _reused(self, group: int, idle_since: int) -> None:
        if group != UNWANTED:
            self._eviction.reused(group, self._num_released - idle_since)

    def _value(self, node: Node) -> float:
        if node.group == UNWANTED:
            return -math.inf
        return self._eviction.value(node.group, self._num_released - node.idle_since)

    def _learn(self) -> None:
        idle = [node for node in self._nodes.values() if not self._pool.refs(node.block)]
        known = [(node.group, node.idle_since) for node in [*idle, *self._ghosts.values()]]
        wanted = [(group, self._num_released - since) for group, since in known if group != UNWANTED]
        self._eviction.learn(np.array([g for g, _ in wanted]), np.array([age for _, age in wanted]))
