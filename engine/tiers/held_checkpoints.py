"""Which blocks an instance tells the schedulers that it holds, where sequences have recurrent states: those that lead to a
checkpoint, be it on the device or below.

Nobody can go on from another block. A checkpoint lies below as long as each block of its state does: what it stands behind is
given up later (`leaves_first`). What a buddy has copied, and what a disk has from an earlier run, is told of once it has been
read back, as by `held_blocks`."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from engine.tiers.held_blocks import CacheEvents, DeviceAndBelow


@dataclass(frozen=True, eq=False)
class _Checkpoint:
    state: tuple[bytes, ...]
    """The digests of its blocks."""
    path: tuple[int, ...]
    """The hashes of all blocks that lead to it."""


class HeldCheckpoints(DeviceAndBelow):
    """The CacheEvents of a device with lower tiers, where sequences have states."""

    def __init__(self, device: CacheEvents, lies_below: Callable[[bytes], bool]) -> None:
        super().__init__(device, lies_below)
        self._below: dict[bytes, _Checkpoint] = {}
        """By each digest of its state."""
        self._reach: Counter[int] = Counter()
        """To how many checkpoints below a block with this hash leads."""
        self._held: set[int] = set()
        """What was reported as held and not as given up."""
        self._changed: dict[int, None] = {}
        """The hashes of blocks that may have come below or gone from there since the last report."""

    def kept(self, state: Sequence[bytes], path: Sequence[int]) -> None:
        """Note that a checkpoint lies below, or is on its way there."""
        if state[0] not in self._below:
            checkpoint = _Checkpoint(tuple(state), tuple(path))
            self._below |= dict.fromkeys(state, checkpoint)
            self._reach.update(path)
            self._changed |= dict.fromkeys(path)

    def drain_cache_events(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        moved, gone = self._hear()
        for digest in gone:
            if digest in self._below and not self._lies_below(digest):  # it may have come back
                self._drop(self._below[digest])
        come: list[int] = []
        went: list[int] = []
        for block in dict.fromkeys((*moved, *self._changed)):
            is_held = block in self._on_device or block in self._reach
            if is_held != (block in self._held):
                (come if is_held else went).append(block)
        self._held.update(come)
        self._held.difference_update(went)
        self._changed.clear()
        return tuple(come), tuple(went)

    def replay_cache_events(self) -> None:
        self._replay()
        self._held.clear()
        self._changed |= dict.fromkeys(self._reach)

    def _drop(self, checkpoint: _Checkpoint) -> None:
        for digest in checkpoint.state:
            del self._below[digest]
        for block in checkpoint.path:
            self._reach[block] -= 1
            if not self._reach[block]:
                del self._reach[block]
        self._changed |= dict.fromkeys(checkpoint.path)
