"""A stretch of the prefix tree in which nothing branches: full blocks that follow each other.

Invariant: for each of `blocks`, `tokens` has one block's tokens and `hashes` one hash. The blocks that nobody refers to are the
last ones, and each fell idle just after the one behind it."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from math import inf

Children = dict[tuple[int, ...], "Run"]
"""The runs that follow a run, by the tokens of their first block."""


@dataclass(slots=True, eq=False)
class Pin:
    """Somebody's wish that certain blocks stay: they go after those that nobody has pinned."""

    ends_at: float
    """Until when, as far as is known. Of pinned blocks those go first whose pin ends first."""
    runs: dict["Run", None] = field(default_factory=dict["Run", None])
    """What is left of them."""


@dataclass(slots=True, eq=False, kw_only=True)
class Run:
    tokens: list[int]
    blocks: list[int]
    hashes: list[int]
    parent: "Run | None"
    """None for a root, which has no block. A root's `hashes` has what the chain of hashes begins with."""
    depth: int
    """The number of blocks from the root to this run's last."""
    children: Children = field(default_factory=Children)
    idle_since: int = 0
    """When the last block was released. The one before it was released a moment later, and so on."""
    wanted: bool = True
    """False where the client that used the blocks last has said that nobody will ask for them again."""
    pins: dict[Pin, None] = field(default_factory=dict[Pin, None])
    """Each of them has this run among its own."""
    num_changes: int = 0
    """The number of blocks and children that came or went. The run's own removal counts, too."""

    def tokens_of(self, block_size: int, index: int) -> tuple[int, ...]:
        return tuple(self.tokens[index * block_size : (index + 1) * block_size])

    @property
    def pinned_until(self) -> float:
        """When the last of its pins ends; in the endless past without any."""
        return max((pin.ends_at for pin in self.pins), default=-inf)

    def pin(self, pin: Pin) -> None:
        self.pins[pin] = pin.runs[self] = None

    def unpin(self, pin: Pin) -> None:
        del self.pins[pin], pin.runs[self]

    def num_common(self, first: int, tokens: Sequence[int], start: int, end: int, block_size: int) -> int:
        """Return how many blocks, from `first` on, hold the tokens from tokens[start] on. Nothing is read from tokens[end] on."""
        count = min(len(self.blocks) - first, (end - start) // block_size)
        mine = self.tokens[first * block_size : (first + count) * block_size]
        theirs = [*tokens[start : start + count * block_size]]
        return num_equal(mine, theirs) // block_size

    def split(self, count: int, block_size: int) -> "Run":
        """Make the first `count` blocks, which must not be all, a run of their own that this one follows. Return the new run."""
        assert self.parent is not None, "a root has no block"
        left = len(self.blocks) - count
        size = count * block_size
        upper = Run(
            tokens=self.tokens[:size],
            blocks=self.blocks[:count],
            hashes=self.hashes[:count],
            parent=self.parent,
            depth=self.depth - left,
            idle_since=self.idle_since + left,
            wanted=self.wanted,
        )
        for pin in self.pins:
            upper.pin(pin)
        self.parent.children[upper.tokens_of(block_size, 0)] = upper
        del self.tokens[:size], self.blocks[:count], self.hashes[:count]
        upper.children[self.tokens_of(block_size, 0)] = self
        self.parent = upper
        self.num_changes += 1
        return upper

    def extend(self, tokens: list[int], blocks: list[int], hashes: list[int]) -> None:
        """Append blocks behind the last one, which nothing else follows."""
        self.tokens += tokens
        self.blocks += blocks
        self.hashes += hashes
        self.depth += len(blocks)
        self.num_changes += 1

    def truncate(self, count: int, block_size: int) -> None:
        """Drop the last `count` blocks."""
        left = len(self.blocks) - count
        del self.tokens[left * block_size :], self.blocks[left:], self.hashes[left:]
        self.depth -= count
        self.idle_since += count
        self.num_changes += 1


def depth_shared(runs: Iterable[Run]) -> int:
    """Return up to which depth the runs of a prefix are others', too: these have gone on from there, or have pinned it."""
    return max((run.depth for run in runs if len(run.children) > 1 or run.pins), default=0)


def num_equal(one: list[int], other: list[int]) -> int:
    """Return how many leading numbers two lists of one length have in common, by comparing halves."""
    if one == other:
        return len(one)
    low, high = 0, len(one)
    while high - low > 1:
        middle = (low + high) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle
    return low
