"""Checkpoints of recurrent states in the prefix cache: at a cached block, blocks with the state behind it.

A prompt can go on from a cached prefix only where there is one. A checkpoint goes when its cached block does, when the budget is
spent and others have been used since, or when nothing else can be given up. Invariant: a checkpoint that somebody copies from is
at a block that somebody refers to."""

from collections import Counter
from collections.abc import Callable, Sequence

from core.errors import Bug
from engine.cache.block_pool import BlockPool

_MOST_SHARE = 0.5
"""The share of the pool that checkpoints may take. They stand for few tokens each, and keys and values need the rest."""

CheckpointKept = Callable[[int, tuple[int, ...], Sequence[int]], None]
"""Called with a checkpoint that is newly kept and is to leave the pool: the cached block that it is at, its blocks, the hashes of
all blocks up to it."""

HashesNoted = Callable[[Sequence[int]], None]


class StateCheckpoints:
    def __init__(self, pool: BlockPool, led: HashesNoted, lost: HashesNoted) -> None:
        """`led` is called with the hashes of cached blocks that lead to a checkpoint from now on, `lost` with those that lead to
        none any more."""
        self._pool, self._led, self._lost = pool, led, lost
        self._at: dict[int, tuple[int, ...]] = {}
        """By cached block, the least recently used first."""
        self._paths: dict[int, Sequence[int]] = {}
        """For each of them, the hashes of all blocks up to it."""
        self._num_saved: dict[int, int] = {}
        """For each of them, `num_saved`."""
        self._reach: Counter[int] = Counter()
        """To how many checkpoints a block with this hash leads."""
        self.on_kept: CheckpointKept | None = None
        self._num_blocks = self._num_pending = 0
        self._most = int(pool.num_blocks * _MOST_SHARE)

    @property
    def num_blocks(self) -> int:
        """The number of blocks that checkpoints take, those that are still to be kept included."""
        return self._num_blocks + self._num_pending

    @property
    def reached_from(self) -> list[int]:
        """The hashes of the blocks that lead to some checkpoint: of any others nobody can make use."""
        return list(self._reach)

    @property
    def num_idle(self) -> int:
        """The number of their blocks that nobody copies from."""
        return sum(len(blocks) for blocks in self._at.values() if self._is_idle(blocks))

    def last(self, blocks: tuple[int, ...]) -> tuple[int, tuple[int, ...]]:
        """Return how many of these blocks, which are cached one behind another, lead to the last checkpoint among them, and its
        blocks."""
        for count in range(len(blocks), 0, -1):
            if (state := self._at.get(blocks[count - 1])) is not None:
                return count, state
        return 0, ()

    def num_saved(self, block: int) -> int:
        """Return behind how many leading blocks the last checkpoint stands, up to the one at `block`, that lower tiers got."""
        return self._num_saved[block]

    def touch(self, block: int) -> None:
        """Note that the checkpoint at `block` is used."""
        self._at[block] = self._at.pop(block)

    def begin(self, count: int) -> bool:
        """Make room in the budget for a checkpoint of `count` blocks, for which others are given up. Returns False, having given
        up none, where that does not suffice."""
        if (excess := self.num_blocks + count - self._most) > 0 and excess > self.num_idle:
            return False
        while self.num_blocks + count > self._most:
            self.give_up()
        self._num_pending += count
        return True

    def keep(self, blocks: list[int], block: int, path: Sequence[int], num_saved: int) -> bool:
        """Keep a checkpoint that has been made, and return True, unless the cached block `block`, where it belongs, has one.

        `path` has the hashes of all blocks up to that one. `num_saved`: behind how many of them the last checkpoint stands that
        lower tiers have, or are to have: where it is this one, `on_kept` hears of it."""
        is_new = block not in self._at
        if is_new:
            self._pool.keep(blocks)
            self._at[block], self._paths[block] = tuple(blocks), path
            self._num_blocks += len(blocks)
            self._reach.update(path)
            self._led([one for one in path if self._reach[one] == 1])
            self._num_saved[block] = num_saved
            if num_saved == len(path) and self.on_kept is not None:
                self.on_kept(block, self._at[block], path)
        self.drop(blocks)
        return is_new

    def drop(self, blocks: list[int]) -> None:
        """Give up the reference that the maker of a checkpoint had to its blocks."""
        self._num_pending -= len(blocks)
        self._pool.drop(blocks)

    def give_up(self) -> int:
        """Give up the least recently used checkpoint that nobody copies from. Returns how many blocks that frees."""
        block = next((block for block, blocks in self._at.items() if self._is_idle(blocks)), None)
        return 0 if block is None else self.gone(block)

    def passed(self, block: int) -> None:
        """Give up the checkpoint at a cached block, if there is one that nobody copies from: a later one has taken its place."""
        if self._is_idle(self._at.get(block, ())):
            self.gone(block)

    def gone(self, block: int) -> int:
        """The cached block is given up, and the checkpoint at it, if there is one. Returns how many blocks that frees."""
        if (blocks := self._at.pop(block, None)) is None:
            return 0
        self._num_blocks -= len(blocks)
        self._pool.forget(blocks)
        path = self._paths.pop(block)
        del self._num_saved[block]
        self._reach.subtract(path)
        lost = [one for one in path if not self._reach[one]]
        for one in lost:
            del self._reach[one]
        self._lost(lost)
        return len(blocks)

    def check_integrity(self, cached: list[bool]) -> None:
        """Raise Bug where a checkpoint is at a block that is not cached, or more blocks are taken than may be."""
        if missing := [block for block in self._at if not cached[block]]:
            raise Bug(f"block {missing[0]} has a checkpoint and is not cached")
        if self._num_blocks != sum(map(len, self._at.values())) or self.num_blocks > self._most:
            raise Bug(f"checkpoints take {self.num_blocks} blocks of at most {self._most}")

    def _is_idle(self, blocks: tuple[int, ...]) -> bool:
        return bool(blocks) and not self._pool.refs(blocks[0])
