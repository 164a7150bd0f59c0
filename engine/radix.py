"""The prefix cache: a tree of full blocks, one root for each tenant, compared token by token.

Invariant: a block's ancestors hold exactly the tokens before it, and are referenced whenever it is. Leaves that nobody
refers to are evicted, in the order that `engine.eviction` gives."""

import heapq
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from core.errors import Bug
from core.kv import child_hash, root_hash
from engine.blocks import BlockPool
from engine.eviction import Eviction, LeastRecentlyUsed
from engine.ghosts import Ghost, Ghosts

_MAX_SIBLINGS_SCANNED = 64
_MIN_LESSON = 256
"""Blocks released from one lesson of the eviction policy to the next, at least; or as many as the pool has."""
_GHOSTS = 8
"""So many times the pool's blocks are remembered after they were given up: a policy learns from what comes too late."""
_UNWANTED = -1
"""The group of blocks whose client has said that nobody will ask for them again."""


HashOf = Callable[[int, tuple[int, ...]], int]
"""The hash of a block from that of the one it follows and its own tokens: core.kv.child_hash, or what knows it already."""

Kept = Callable[[str, int, tuple[int, ...], int], None]
"""Hears of a block that is newly kept: its tenant, the kept block that it follows (-1: it is the first), its tokens, itself."""


@dataclass(slots=True, eq=False)
class _Node:
    tokens: tuple[int, ...]
    block: int
    hash: int
    parent: "_Node | None"
    depth: int
    """Blocks from the root to this one."""
    uses: int = 1
    """Sequences that had it, or, when it was new, that had what it continues."""
    children: dict[tuple[int, ...], "_Node"] = field(default_factory=dict)
    idle_since: int = 0
    group: int = 0
    queued: bool = False
    """Is in a queue of eviction candidates, at most once."""
    num_changes: int = 0
    """Children that came or went; its own going is one, too."""


@dataclass(frozen=True, slots=True)
class Match:
    """Cached KV of a prefix: full blocks, and perhaps the first `partial_tokens` tokens of one more."""

    blocks: tuple[int, ...]
    partial_block: int = -1
    partial_tokens: int = 0
    end: _Node | None = field(default=None, compare=False, repr=False)
    num_changes: int = field(default=0, compare=False, repr=False)
    """Of `end`, when it was found."""


class RadixCache:
    def __init__(
        self,
        pool: BlockPool,
        block_size: int,
        enabled: bool = True,
        eviction: Eviction | None = None,
        hash_of: HashOf = child_hash,
    ) -> None:
        self._pool, self._block_size, self._enabled = pool, block_size, enabled
        self._hash_of = hash_of
        self._eviction = eviction or LeastRecentlyUsed()
        self.on_kept: Kept | None = None
        self._roots: dict[str, _Node] = {}
        self._nodes: dict[int, _Node] = {}
        self._idle: dict[int, list[tuple[int, int, _Node]]] = {}
        """By group: a heap of leaves that nobody refers to, the longest idle first."""
        self._ghosts = Ghosts(_GHOSTS * pool.num_blocks)
        self._num_released = 0
        self._next_lesson = max(_MIN_LESSON, pool.num_blocks)
        self._added: dict[int, None] = {}
        self._removed: dict[int, None] = {}

    @property
    def num_evictable(self) -> int:
        """Cached blocks that nobody refers to: as good as free."""
        return self._pool.num_blocks - self._pool.num_free - self._pool.num_used

    def match(self, tokens: Sequence[int], salt: str, *, partial: bool) -> Match:
        """The longest cached prefix that leaves at least one token to compute. Takes no reference."""
        node = self._roots.get(salt)
        size, limit = self._block_size, len(tokens) - 1
        blocks: list[int] = []
        start = 0
        while node is not None and start + size <= limit:
            child = node.children.get(tuple(tokens[start : start + size]))
            if child is None:
                break
            blocks.append(child.block)
            node, start = child, start + size
        if node is None:
            return Match(tuple(blocks))
        best, best_length = -1, 0
        if partial:
            best, best_length = _longest_common(node, tokens[start : min(start + size, limit)])
        return Match(tuple(blocks), best, best_length, node, node.num_changes)

    def still_finds(self, match: Match) -> bool:
        """Would the same be found for the same tokens? Its last block tells: while that is kept, so is what it follows."""
        return match.end is not None and match.end.num_changes == match.num_changes

    def use(self, blocks: Sequence[int]) -> None:
        """A sequence is about to refer to these cached blocks, which `match` gave it."""
        for block in blocks:
            node = self._nodes[block]
            node.uses += 1
            if not self._pool.refs(block):
                self._reused(node.group, node.idle_since)

    def insert(
        self,
        tokens: Sequence[int],
        num_full: int,
        blocks: Sequence[int],
        salt: str,
        num_known: int = 0,
        twins: Sequence[int] = (),
    ) -> list[int]:
        """Keep the first `num_full` blocks of a sequence, whose KV is complete; `num_known` of them were handled before, which
        returned `twins`.

        Where another block with the same prefix is kept already, the sequence's own stays private. Such twins are returned:
        the sequence must refer to them too, so that no cached block is in use while its prefix could be evicted."""
        if not self._enabled:
            return []
        size = self._block_size
        node = self._last_known(blocks, num_known, twins) if num_known else self._root(salt)
        more: list[int] = []
        for index in range(num_known, num_full):
            key = tuple(tokens[index * size : (index + 1) * size])
            child = node.children.get(key)
            if child is None:
                child = self._keep(node, key, blocks[index])
                if self.on_kept is not None:
                    self.on_kept(salt, node.block, key, child.block)
            elif child.block != blocks[index]:
                more.append(child.block)
            node = child
        return more

    def release(self, idle_blocks: Sequence[int], priority: int = 0, wanted: bool = True) -> None:
        """Nobody refers to these cached blocks any more (as BlockPool.drop reports): they may be evicted.

        Unless `wanted`, they go first; but not those from where several sequences have gone on."""
        nodes = [self._nodes[block] for block in idle_blocks]
        num_tokens = max((node.depth for node in nodes), default=0) * self._block_size
        groups: dict[int, int] = {}
        for node in nodes:
            node.idle_since = self._num_released
            if not wanted and len(node.children) <= 1:
                node.group = _UNWANTED
            else:
                group = groups.get(node.uses)
                if group is None:
                    group = groups[node.uses] = self._eviction.group(node.uses, num_tokens, priority)
                node.group = group
            self._num_released += 1
            self._offer(node)
        if self._eviction.learns and self._num_released >= self._next_lesson:
            self._next_lesson = self._num_released + max(_MIN_LESSON, self._pool.num_blocks)
            self._learn()

    def evict(self, count: int) -> None:
        """Give `count` blocks back to the pool. The caller has checked `num_evictable`."""
        while count:
            group, limit = self._least()
            while count and self._clean(group) and self._value(group) <= limit:
                _, _, node = heapq.heappop(self._idle[group])
                node.queued = False
                self._remove(node)
                count -= 1

    def drain_events(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Hashes (core.kv.block_hashes) of blocks kept and given up since the last call."""
        events = tuple(self._added), tuple(self._removed)
        self._added.clear()
        self._removed.clear()
        return events

    def replay_events(self) -> None:
        """Report everything that is kept as if it were new."""
        self._removed.clear()
        self._added = dict.fromkeys(node.hash for node in self._nodes.values())

    def check_integrity(self) -> None:
        """Raises Bug where the tree and the pool disagree."""
        for block, node in self._nodes.items():
            if (
                node.block != block
                or node.parent is None
                or node.parent.children.get(node.tokens) is not node
            ):
                raise Bug(f"cached block {block} is not where the prefix tree says")
            parent_idle = node.parent.block >= 0 and not self._pool.refs(node.parent.block)
            if parent_idle and self._pool.refs(block):
                raise Bug(f"cached block {block} is in use but its prefix is not")
        idle = sum(not self._pool.refs(block) for block in self._nodes)
        if self.num_evictable != idle:
            raise Bug(f"{self.num_evictable} blocks look evictable, the tree knows {idle}")

    def _root(self, salt: str) -> _Node:
        root = self._roots.get(salt)
        if root is None:
            root = self._roots[salt] = _Node((), -1, root_hash(salt), None, 0)
        return root

    def _last_known(self, blocks: Sequence[int], num_known: int, twins: Sequence[int]) -> _Node:
        """A sequence refers to all that is kept of its prefix: what it last had kept, or the last twin, is still there."""
        node = self._nodes.get(blocks[num_known - 1]) or self._nodes[twins[-1]]
        if node.depth != num_known:
            raise Bug(f"block {node.block} is kept at {node.depth}, its sequence has it at {num_known}")
        return node

    def _keep(self, parent: _Node, key: tuple[int, ...], block: int) -> _Node:
        if block in self._nodes:
            raise Bug(f"block {block} is cached for another prefix")
        node = _Node(key, block, self._hash_of(parent.hash, key), parent, parent.depth + 1)
        node.uses = self._uses_before(node, parent)
        parent.children[key] = node
        parent.num_changes += 1
        self._nodes[block] = node
        self._pool.keep(block)
        if self._removed.pop(node.hash, 0) == 0:
            self._added[node.hash] = None
        return node

    def _uses_before(self, node: _Node, parent: _Node) -> int:
        """It was given up and is wanted again; or it goes on from what was used before. Where many go on differently (from a
        system prompt), each of them was used once."""
        ghost = self._ghosts.recall(node.hash)
        if ghost is None:
            return max(1, parent.uses // (1 + len(parent.children)))
        self._reused(ghost.group, ghost.idle_since)
        return ghost.uses + 1

    def _reused(self, group: int, idle_since: int) -> None:
        if self._eviction.learns and group != _UNWANTED:
            self._eviction.reused(group, self._num_released - idle_since)

    def _remove(self, node: _Node) -> None:
        parent = node.parent
        assert parent is not None
        if self._eviction.learns:
            self._ghosts.remember(node.hash, Ghost(node.group, node.idle_since, node.uses))
        del parent.children[node.tokens]
        parent.num_changes += 1
        node.num_changes += 1
        del self._nodes[node.block]
        self._pool.forget(node.block)
        if self._added.pop(node.hash, 0) == 0:
            self._removed[node.hash] = None
        self._offer(parent)

    def _offer(self, node: _Node) -> None:
        if not node.queued and self._is_idle_leaf(node):
            node.queued = True
            heapq.heappush(self._idle.setdefault(node.group, []), (node.idle_since, node.block, node))

    def _least(self) -> tuple[int, float]:
        """The group to evict from, and the value of the next best: up to there it goes on."""
        for group in list(self._idle):
            self._clean(group)
        values = sorted((self._value(group), group) for group, heap in self._idle.items() if heap)
        return values[0][1], values[1][0] if len(values) > 1 else math.inf

    def _value(self, group: int) -> float:
        if group == _UNWANTED:
            return -math.inf
        return self._eviction.value(group, self._num_released - self._idle[group][0][0])

    def _clean(self, group: int) -> bool:
        """Take what is no candidate any more from the head of a group's heap, or over to its new group; whether one is left."""
        heap = self._idle[group]
        while heap:
            idle_since, _, node = heap[0]
            current = self._is_idle_leaf(node)
            if current and (node.idle_since, node.group) == (idle_since, group):
                return True
            heapq.heappop(heap)
            node.queued = False
            self._offer(node)
        return False

    def _learn(self) -> None:
        idle = [node for node in self._nodes.values() if not self._pool.refs(node.block)]
        given_up, since = self._ghosts.groups_and_times()
        groups = np.concatenate((np.array([node.group for node in idle], np.int64), given_up))
        times = np.concatenate((np.array([node.idle_since for node in idle], np.int64), since))
        wanted = groups != _UNWANTED
        self._eviction.learn(groups[wanted], self._num_released - times[wanted])

    def _is_idle_leaf(self, node: _Node) -> bool:
        return (
            node.block >= 0
            and not node.children
            and self._nodes.get(node.block) is node
            and not self._pool.refs(node.block)
        )


def _longest_common(node: _Node, wanted: Sequence[int]) -> tuple[int, int]:
    """The child block that shares the most leading tokens with `wanted`, and how many (-1, 0 if none)."""
    best, best_length = -1, 0
    for key, child in itertools.islice(reversed(node.children.items()), _MAX_SIBLINGS_SCANNED):
        length = next(
            (i for i, (a, b) in enumerate(zip(key, wanted, strict=False)) if a != b),
            min(len(key), len(wanted)),
        )
        if length > best_length:
            best, best_length = child.block, length
    return best, best_length
