"""What a prefix cache remembers of blocks that it has given up. Blocks that went one after another are remembered together.

Invariant: `_chunks` has each chunk of which something is remembered, by the hash of the block that went last. `_order` has the
chunks in the order in which they went, and perhaps empty ones between. A prefix goes after what follows it, and so is also
forgotten after it."""

from array import array
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

_FEW = 64
"""The number of empty chunks that may stay in `_order` however few others there are."""


class Ghost(NamedTuple):
    group: int
    idle_since: int
    uses: int


@dataclass(slots=True, eq=False, kw_only=True)
class _Chunk:
    hashes: "array[int]"
    """Hashes in the order in which the blocks went: in the prompt, each block follows the next one here."""
    before: int
    """The hash of the block that the last of these followed in the prompt."""
    group: int
    idle_since: int
    """When the first block fell idle. Each later one did so a moment after the one before it."""
    uses: int
    num_forgotten: int = 0
    """The number of hashes, from the first on, that are forgotten."""

    def __len__(self) -> int:
        return len(self.hashes) - self.num_forgotten

    def goes_on_with(self, block_hash: int, ghost: Ghost) -> bool:
        return (
            len(self) > 0
            and self.before == block_hash
            and (self.group, self.idle_since + len(self.hashes), self.uses) == ghost
        )


class Ghosts:
    def __init__(self, limit: int) -> None:
        """Remember at most `limit` blocks. The oldest are forgotten first."""
        self._limit = limit
        self._chunks: dict[int, _Chunk] = {}
        self._order = deque[_Chunk]()
        self._num_remembered = 0

    def __len__(self) -> int:
        return self._num_remembered

    def remember(self, hashes: Sequence[int], before: int, ghost: Ghost) -> None:
        """Remember blocks that are given up now, by their `hashes` (64 bits each). In the prompt each block followed the next
        one, and the last one followed the block `before`. None of them is remembered yet. `ghost` describes the first; each other
        one fell idle a moment after the one before it."""
        newest = self._order[-1] if self._order else None
        if newest is not None and newest.goes_on_with(hashes[0], ghost):
            del self._chunks[newest.hashes[-1]]
            newest.hashes.extend(hashes)
            newest.before = before
        else:
            newest = _Chunk(hashes=array("Q", hashes), before=before, **ghost._asdict())
            self._order.append(newest)
        self._chunks[hashes[-1]] = newest
        self._num_remembered += len(hashes)
        if self._num_remembered > self._limit:
            self._forget(self._num_remembered - self._limit)

    def recall(self, hashes: Sequence[int]) -> list[Ghost]:
        """Return what is known of the first of these blocks, which are wanted again and follow each other, and forget it. Nothing
        is known of the blocks behind those."""
        ghosts = list[Ghost]()
        for block_hash in hashes:
            chunk = self._chunks.pop(block_hash, None)
            if chunk is None:
                break
            chunk.hashes.pop()
            chunk.before = block_hash
            ghosts.append(Ghost(chunk.group, chunk.idle_since + len(chunk.hashes), chunk.uses))
            if len(chunk):
                self._chunks[chunk.hashes[-1]] = chunk
        self._num_remembered -= len(ghosts)
        if len(self._order) > 2 * len(self._chunks) + _FEW:
            self._order = deque(chunk for chunk in self._order if len(chunk))
        return ghosts

    def groups_and_times(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the group and the idle time of every remembered block, oldest first."""
        chunks = [chunk for chunk in self._order if len(chunk)]
        sizes = np.array([len(chunk) for chunk in chunks], np.int64)
        groups = np.array([chunk.group for chunk in chunks], np.int64)
        since = np.array([chunk.idle_since + chunk.num_forgotten for chunk in chunks], np.int64)
        return np.repeat(groups, sizes), counted_up(since, sizes)

    def _forget(self, count: int) -> None:
        """Forget the `count` oldest blocks."""
        self._num_remembered -= count
        while count:
            oldest = self._order[0]
            taken = min(count, len(oldest))
            oldest.num_forgotten += taken
            count -= taken
            if not len(oldest):
                if taken:
                    del self._chunks[oldest.hashes[-1]]
                self._order.popleft()


def counted_up(starts: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    """Return starts[0], starts[0] + 1, ... (sizes[0] numbers), then those from starts[1] on, and so on."""
    ends = np.cumsum(sizes)
    total = int(ends[-1]) if len(ends) else 0
    return np.arange(total) + np.repeat(starts - (ends - sizes), sizes)
