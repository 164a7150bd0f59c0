"""Reference counts of KV blocks.

Invariant: a block is free, or referenced by sequences and / or kept by the prefix cache; never free and one of the others."""

from collections.abc import Iterable, Sequence

from core.errors import Bug


class BlockPool:
    """Reference counts over the blocks [first_block, first_block + num_blocks) and the list of free ones."""

    def __init__(self, num_blocks: int, first_block: int = 0) -> None:
        self.num_blocks = num_blocks
        self.blocks = range(first_block, first_block + num_blocks)
        self._refs = [0] * self.blocks.stop
        self._cached = [False] * self.blocks.stop
        self._free = list(reversed(self.blocks))
        self._num_used = 0

    @property
    def num_free(self) -> int:
        """The number of blocks that are neither referenced nor kept by the prefix cache."""
        return len(self._free)

    @property
    def num_used(self) -> int:
        """The number of blocks that some sequence refers to."""
        return self._num_used

    def refs(self, block: int) -> int:
        return self._refs[block]

    def take(self, count: int) -> list[int]:
        """Take `count` free blocks, each with one reference. The caller has checked `num_free`."""
        taken = self._free[len(self._free) - count :]
        del self._free[len(self._free) - count :]
        for block in taken:
            self._refs[block] = 1
        self._num_used += count
        return taken

    def share(self, blocks: Iterable[int]) -> None:
        """Add one reference to each of `blocks`, which are in use or cached."""
        for block in blocks:
            self._num_used += self._refs[block] == 0
            self._refs[block] += 1

    def drop(self, blocks: Sequence[int]) -> list[int]:
        """Remove one reference from each of `blocks`. Uncached blocks without references become free; cached ones are
        returned."""
        idle: list[int] = []
        for block in blocks:
            self._refs[block] -= 1
            if self._refs[block] == 0:
                self._num_used -= 1
                if self._cached[block]:
                    idle.append(block)
                else:
                    self._free.append(block)
            elif self._refs[block] < 0:
                raise Bug(f"block {block} was given back twice")
        return idle

    def keep(self, blocks: Iterable[int]) -> None:
        """Mark `blocks` as kept by the prefix cache."""
        for block in blocks:
            self._cached[block] = True

    def forget(self, blocks: Iterable[int]) -> None:
        """Mark `blocks`, which nobody refers to, as no longer kept by the prefix cache."""
        for block in blocks:
            if self._refs[block] or not self._cached[block]:
                raise Bug(f"block {block} was evicted while in use")
            self._cached[block] = False
            self._free.append(block)

    def check_integrity(self, expected_refs: Sequence[int]) -> None:
        """Raise Bug when the counts differ from `expected_refs`, counted by the owners, or a block is in two states."""
        for block in self.blocks:
            if (have := self._refs[block]) != (want := expected_refs[block]):
                raise Bug(f"block {block} has {have} references, its owners hold {want}")
        free = set(self._free)
        if len(free) != len(self._free):
            raise Bug("a block is twice in the free list")
        for block in self.blocks:
            if (block in free) != (self._refs[block] == 0 and not self._cached[block]):
                raise Bug(
                    f"block {block}: free {block in free}, {self._refs[block]} references, cached {self._cached[block]}"
                )
