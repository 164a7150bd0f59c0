"""A draft model's KV, beside the target's: a pool with as many blocks of as many tokens. A sequence's blocks are those that it
has in the target's, so nobody allocates any.

Invariant: what a block holds is told by a hash of all tokens up to its end, and nothing else is believed. So a sequence finds
there what others have computed of its prefix. Blocks that were another's, or whose KV other instances and tiers have filled, are
computed anew."""

from collections.abc import Sequence

import torch

from core.kv import KVShard, hash_chain, root_hash
from engine.execution.batch.batch import RankSeq
from engine.execution.pools.kv_pool import layers_of, pool_parts
from kernels.ops import KVLayer

_ROOT = root_hash("")


def draft_layers(shard: KVShard, num_blocks: int, device: torch.device) -> list[KVLayer]:
    """Return a pool's layers, all zero."""
    flat = torch.zeros(shard.pool_bytes(num_blocks), dtype=torch.uint8, device=device)
    return layers_of(shard, pool_parts(shard, num_blocks, flat))


class DraftBlocks:
    """What the blocks hold."""

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self._hashes: dict[int, int] = {}
        """By block, for those that are full."""

    def num_equal(self, hashes: Sequence[int], block_ids: Sequence[int]) -> int:
        """Return how many of the first of `block_ids` hold what the blocks of `hashes` do."""
        count = 0
        for block, wanted in zip(block_ids, hashes, strict=False):
            if self._hashes.get(block) != wanted:
                break
            count += 1
        return count

    def written(self, block_ids: Sequence[int]) -> None:
        """Other tokens are written into these."""
        for block in block_ids:
            self._hashes.pop(block, None)

    def filled(self, block_ids: Sequence[int], hashes: Sequence[int]) -> None:
        """These are full of the tokens that `hashes` tell."""
        self._hashes.update(zip(block_ids, hashes, strict=True))


class DraftSeq:
    """A sequence as the draft model knows it."""

    def __init__(self, seq: RankSeq, blocks: DraftBlocks) -> None:
        self.seq = seq
        self._blocks, self._size = blocks, blocks.block_size
        self._num_computed = 0
        self._drafts: tuple[int, ...] = ()
        """Tokens behind those whose KV is computed, too. They may have been wrong."""
        self._hashes: list[int] = []
        """The hashes of its full blocks of computed tokens."""
        self._is_found = False

    def find(self, block_ids: Sequence[int]) -> int:
        """Return how many of its known tokens have their KV: those that it has computed, or others in its blocks. The last one's
        is computed again at the least, since a draft token follows from it."""
        seq = self.seq
        if not self._is_found:
            self._is_found = True
            known = seq.tokens[: seq.num_tokens - 1].tolist()
            hashes = hash_chain(_ROOT, known, self._size)
            self._hashes = hashes[: self._blocks.num_equal(hashes, block_ids)]
            self._num_computed = len(self._hashes) * self._size
        for draft in self._drafts:
            if self._num_computed >= seq.num_tokens - 1 or seq.tokens[self._num_computed] != draft:
                break
            self._num_computed += 1
        self._drafts = ()
        self._keep(block_ids)
        return self._num_computed

    def computed(self, count: int, block_ids: Sequence[int]) -> None:
        """The KV of so many more of its known tokens is computed."""
        self._touch(count, block_ids)
        self._num_computed += count
        self._keep(block_ids)

    def drafted(self, token: int, block_ids: Sequence[int]) -> None:
        """The KV of a draft token behind its known tokens, and behind the draft tokens before it, is computed."""
        self._touch(len(self._drafts) + 1, block_ids)
        self._drafts += (token,)

    def _touch(self, count: int, block_ids: Sequence[int]) -> None:
        end = self._num_computed + count
        self._blocks.written(block_ids[self._num_computed // self._size : -(-end // self._size)])

    def _keep(self, block_ids: Sequence[int]) -> None:
        first, last = len(self._hashes), self._num_computed // self._size
        if last > first:
            tokens = self.seq.tokens[first * self._size : last * self._size].tolist()
            self._hashes += hash_chain(self._hashes[-1] if first else _ROOT, tokens, self._size)
            self._blocks.filled(block_ids[first:last], self._hashes[first:])
