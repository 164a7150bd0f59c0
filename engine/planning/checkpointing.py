"""When and where the recurrent states of sequences are kept as checkpoints of the prefix cache. Owned by BlockLedger.

Invariant: a checkpoint has the state behind a whole number of blocks, all of which are in the prefix cache."""

from collections.abc import Callable
from dataclasses import dataclass

from core.kv import num_blocks_for
from engine.cache.block_pool import BlockPool
from engine.cache.radix_cache import PrefixMatch, RadixCache
from engine.planning.sequence import Sequence

_LEAST_BLOCKS = 4
"""What a checkpoint must spare: fewer blocks are computed again as fast as a step more is made for them."""
_EVERY = 16
"""A sequence that generates leaves a checkpoint every so many blocks. A copy costs a part of what each step does with a state."""
_APART = 0.25
"""Checkpoints that leave the pool have at least so much of what a state takes between them, in blocks of tokens. So their copies
take at most four times what those of keys and values do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Checkpoint:
    """Blocks into which a step copies a sequence's recurrent state behind its first `num_full` blocks of tokens."""

    seq: Sequence
    num_full: int
    blocks: list[int]
    num_saved: int
    """As in `StateCheckpoints.keep`."""
    is_passing: bool
    """Whether the sequence's next one takes its place."""


def blocks_apart(num_state_blocks: int) -> int:
    """Return the least number of blocks between checkpoints that leave the pool."""
    return max(_EVERY, int(num_state_blocks * _APART))


class Checkpointing:
    def __init__(self, pool: BlockPool, cache: RadixCache, block_size: int, num_state_blocks: int) -> None:
        self._pool, self._cache, self._block_size = pool, cache, block_size
        self._num_state_blocks = num_state_blocks
        self._is_on = num_state_blocks > 0 and cache.enabled
        self.num_apart = blocks_apart(num_state_blocks)
        self._made: dict[int, list[_Checkpoint]] = {}
        """By step, the checkpoints that it makes."""

    @property
    def held_blocks(self) -> list[int]:
        """The blocks of checkpoints that steps in flight make. Each has one reference for that."""
        return [block for made in self._made.values() for one in made for block in one.blocks]

    def admitted(self, seq: Sequence, match: PrefixMatch) -> None:
        """Decide where the state of an admitted sequence is to be kept: where it departs from what others had, behind its last
        full block, which a conversation goes on from, and the first time in what it generates."""
        if not self._is_on:
            return
        found: list[int] = []
        last = (len(seq.tokens) - 1) // self._block_size
        before = len(match.blocks)
        seq.num_saved = self._cache.checkpoints.num_saved(match.blocks[-1]) if match.state else 0
        for num_full in (match.num_alike, last if seq.request.retain else 0):
            if num_full >= before + _LEAST_BLOCKS:
                found.append(num_full * self._block_size)
                before = num_full
        seq.checkpoints = [*found, (last + _EVERY) * self._block_size]

    def has_come(self, seq: Sequence) -> None:
        """Decide the same for a sequence that another instance has begun. Its state is kept where the next block ends."""
        if self._is_on:
            next_end = num_blocks_for(seq.num_computed, self._block_size)
            seq.checkpoints = [max(next_end, _EVERY) * self._block_size]

    def stripped(self, seq: Sequence) -> None:
        """Forget where the sequence's state is to be kept."""
        seq.checkpoints, seq.passed_checkpoint, seq.num_saved = [], -1, 0

    def before(self, seq: Sequence, count: int) -> int:
        """Return how many of its next `count` tokens are to be computed before a checkpoint is made."""
        if not seq.checkpoints:
            return count
        ends = [end - seq.num_computed for end in seq.checkpoints if end > seq.num_computed]
        return min([count, *ends])

    def make(self, seq: Sequence, step: int, num_spare: int, take: Callable[[int], list[int]]) -> list[int]:
        """Return the blocks into which `step` is to copy the sequence's state, as it finds it. Returns none where no checkpoint
        is to be made, the budget does not allow it, or the `num_spare` blocks that `take` may be asked for are too few."""
        if not seq.checkpoints or seq.checkpoints[0] != seq.num_computed:
            return []
        is_passing, count = len(seq.checkpoints) == 1, self._num_state_blocks
        del seq.checkpoints[0]
        if is_passing:
            seq.checkpoints.append(seq.num_computed + _EVERY * self._block_size)
        if num_spare < count or not self._cache.checkpoints.begin(count):
            return []
        blocks, num_full = take(count), seq.num_computed // self._block_size
        made = _Checkpoint(
            seq=seq,
            num_full=num_full,
            blocks=blocks,
            num_saved=self._num_saved(seq, num_full),
            is_passing=is_passing,
        )
        self._made.setdefault(step, []).append(made)
        return blocks

    def committed(self, step: int) -> None:
        for made in self._made.pop(step, []):
            seq = made.seq
            if seq.num_kept != made.num_full:  # it had left when the step before ended
                self._cache.checkpoints.drop(made.blocks)
                continue
            own = seq.block_ids[self._num_state_blocks :]
            at = self._cache.keep_checkpoint(made.blocks, own, seq.num_kept, seq.twins, made.num_saved)
            if made.is_passing:
                self._cache.checkpoints.passed(seq.passed_checkpoint)
                seq.passed_checkpoint = at

    def undone(self, step: int) -> None:
        for made in self._made.pop(step, []):
            self._cache.checkpoints.drop(made.blocks)

    def leave_state(self, seq: Sequence) -> None:
        """Make the state of a sequence that ends a checkpoint, where it ends with a block and no step is in flight."""
        num_full, rest = divmod(seq.num_computed, self._block_size)
        count = self._num_state_blocks
        if not self._is_on or rest or seq.num_kept != num_full or not self._cache.checkpoints.begin(count):
            return
        state, own = seq.block_ids[:count], seq.block_ids[count:]
        self._pool.share(state)
        self._cache.keep_checkpoint(state, own, num_full, seq.twins, self._num_saved(seq, num_full))

    def _num_saved(self, seq: Sequence, num_full: int) -> int:
        """Return `seq.num_saved` when a checkpoint is made behind the sequence's first `num_full` blocks. It leaves the pool if
        it is far enough from the last one that did."""
        if num_full - seq.num_saved >= self.num_apart:
            seq.num_saved = num_full
        return seq.num_saved
