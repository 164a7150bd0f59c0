"""The prefix cache block by block: what `radix_cache.RadixCache` has to do, without runs and heaps.

Each step looks at everything that is kept."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import inf

from core.kv import block_hashes
from engine.cache.block_pool import BlockPool


@dataclass(eq=False, kw_only=True)
class Node:
    path: tuple[int, ...]
    """All tokens up to its last."""
    block: int
    hash: int
    idle_since: int = 0
    wanted: bool = True
    pins: dict[str, float] = field(default_factory=dict[str, float])
    """When each of them ends."""


class PlainCache:
    def __init__(self, pool: BlockPool, block_size: int) -> None:
        self._pool, self._size = pool, block_size
        self._nodes: dict[tuple[int, ...], Node] = {}
        self._num_released = 0
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

    def insert(
        self, tokens: Sequence[int], num_full: int, blocks: Sequence[int], num_known: int
    ) -> list[int]:
        hashes = block_hashes(tokens, self._size)
        twins: list[int] = []
        for index in range(num_known, num_full):
            path = tuple(tokens[: (index + 1) * self._size])
            node = self._nodes.get(path)
            if node is None:
                node = self._nodes[path] = Node(path=path, block=blocks[index], hash=hashes[index])
                self._pool.keep([node.block])
                self._note(node.hash, 0)
            elif node.block != blocks[index]:
                twins.append(node.block)
        return twins

    def release(self, blocks: Sequence[int], wanted: bool) -> None:
        nodes = [self._with(block) for block in blocks]
        shared = self._shared(nodes)
        for node in nodes:
            node.wanted = wanted or len(node.path) <= shared
            node.idle_since = self._num_released
            self._num_released += 1

    def pin(self, name: str, ends_at: float, tokens: Sequence[int], num_blocks: int) -> None:
        for index in range(num_blocks):
            self._nodes[tuple(tokens[: (index + 1) * self._size])].pins[name] = ends_at

    def unpin(self, name: str, wanted: bool) -> None:
        nodes = [node for node in self._nodes.values() if name in node.pins]
        for node in nodes:
            del node.pins[name]
        shared = self._shared(nodes)
        for node in nodes:
            node.wanted = node.wanted and (wanted or len(node.path) <= shared)

    def num_pinned(self) -> int:
        return sum(bool(node.pins) and not self._pool.refs(node.block) for node in self._nodes.values())

    def evict(self, count: int) -> None:
        for _ in range(count):
            self._remove(min(self._leaves(), key=_order))

    def _shared(self, nodes: Sequence[Node]) -> int:
        """Up to how many tokens these nodes of a prefix are others', too."""
        return max(
            (len(node.path) for node in nodes if len(self._children(node.path)) > 1 or node.pins), default=0
        )

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

    def _remove(self, node: Node) -> None:
        del self._nodes[node.path]
        self._pool.forget([node.block])
        self._note(node.hash, 1)

    def _note(self, block_hash: int, what: int) -> None:
        if block_hash in self.events[1 - what]:
            self.events[1 - what].remove(block_hash)
        else:
            self.events[what].add(block_hash)


def _order(node: Node) -> tuple[float, bool, int]:
    return max(node.pins.values(), default=-inf), node.wanted, node.idle_since
