"""What a drafting head's pool holds, beside the target's: it has as many blocks of as many tokens. A sequence's blocks are those
that it has in the target's, so nobody allocates any.

The KV of token i is made of the target's hidden state behind it, which is there only when the target computes it here. So KV that
came by a hand-over, a migration, a copy or a lower tier cannot be had afterwards: a sequence's context begins with the first
block of which everything is computed here, or has been, for whichever sequence.

Invariant: a sequence reads nothing that was made of other tokens than its own, with one exception: the state behind the last
token of a shared prefix is joined to the token that followed it where it was computed."""

from collections.abc import Sequence
from itertools import takewhile

from core.kv import hash_chain, root_hash
from core.plan import BlockCopy
from engine.execution.batch.batch import RankSeq

_ROOT = root_hash("")


class HeadBlocks:
    """What the blocks hold."""

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self._held: dict[int, tuple[int, tuple[int, ...]]] = {}
        """For each block the hash of all tokens before it, and the tokens of its first slots."""

    def num_held(self, tokens: Sequence[int], block_ids: Sequence[int]) -> int:
        """Return how many of `tokens`, from the first on, have their KV in these blocks."""
        size, count, before = self.block_size, 0, _ROOT
        for block, at in zip(block_ids, range(0, len(tokens), size), strict=False):
            own = tuple(tokens[at : at + size])
            follows, held = self._held.get(block, (0, ()))
            equal = takewhile(lambda pair: pair[0] == pair[1], zip(own, held, strict=False))
            found = sum(1 for _ in equal) if follows == before else 0
            count += found
            if found < size:
                break
            before = hash_chain(before, own, size)[0]
        return count

    def copied(self, copies: Sequence[BlockCopy]) -> None:
        """The leading slots of blocks are copied to others."""
        for copy in copies:
            before, tokens = self._held.get(copy.src, (0, ()))
            self._held[copy.dst] = before, tokens[: copy.num_tokens]

    def filled(self, block: int, before: int, tokens: Sequence[int]) -> None:
        """The block holds these tokens from its first slot on, behind those that `before` is the hash of."""
        self._held[block] = before, tuple(tokens)

    def cut(self, block: int, num_tokens: int) -> None:
        """Nothing is known any more of what lies behind the block's first `num_tokens` slots."""
        before, tokens = self._held.get(block, (0, ()))
        self._held[block] = before, tokens[:num_tokens]


class HeadSeq:
    """A sequence as the head knows it."""

    def __init__(self, seq: RankSeq, blocks: HeadBlocks) -> None:
        self.seq = seq
        self._blocks, self._size = blocks, blocks.block_size
        self.first_block = 0
        """Where its context begins."""
        self._num_computed = 0
        """The tokens from there on, counted from the sequence's first, that have KV."""
        self._is_new = True
        self._hashes = [_ROOT]
        """The hash of all tokens before each block, as far as they are known to be full."""

    def start(self, at: int, block_ids: Sequence[int]) -> int:
        """The target has computed tokens from `at` on. Return which of them is the first to be computed here: behind a gap the
        context begins anew with the next block."""
        if self._is_new:
            self._is_new = False
            self._num_computed = self._blocks.num_held(self.seq.tokens[:at].tolist(), block_ids)
        if self._num_computed < at:
            self.first_block = -(-at // self._size)
            self._num_computed = self.first_block * self._size
        return max(at, self.first_block * self._size)

    def computed(self, start: int, end: int, block_ids: Sequence[int]) -> None:
        """The KV of known tokens [start, end) is computed."""
        self._num_computed = max(self._num_computed, end)
        for index in range(start // self._size, -(-end // self._size)):
            if self.first_block:
                self._blocks.cut(block_ids[index], 0)  # made without what lies before it, which others have
            else:
                own = self.seq.tokens[index * self._size : min(end, (index + 1) * self._size)]
                self._blocks.filled(block_ids[index], self._hash_before(index), own.tolist())

    def drafted(self, at: int, block_ids: Sequence[int]) -> None:
        """The KV of token `at`, which may be a wrong draft token, or is made of a state that the target has not computed, is
        there."""
        self._blocks.cut(block_ids[at // self._size], at % self._size)

    def _hash_before(self, index: int) -> int:
        first, end = (len(self._hashes) - 1) * self._size, index * self._size
        if end > first:
            self._hashes += hash_chain(self._hashes[-1], self.seq.tokens[first:end].tolist(), self._size)
        return self._hashes[index]
