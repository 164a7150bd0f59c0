"""Sizes and offsets of a paged KV cache, without tensors.

A rank's pool is one contiguous region, row-major over (layer, block, K|V, head, slot, head_dim): one block of one layer is
contiguous, so whole blocks and runs of neighbouring blocks are moved in one piece."""

import hashlib
import struct
from collections.abc import Sequence
from dataclasses import dataclass

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3fn": 1, "int8": 1}
SCALE_BYTES = 4
"""One float32."""
PAGE_BYTES = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class KVLayout:
    """The model's KV state for one token, and how many tokens a block holds."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    dtype: str
    scales: str = "none"
    """`vector`: the pool's data is followed by one float32 for each of its vectors, in their order, to multiply it with."""
    group: int = 0
    """Neighbouring numbers of a vector that share a scale, where there are scales; 0: all of it."""
    kept: tuple[int, int] = (0, 0)
    """The numbers [first, end) of a vector that are bfloat16, without a scale, where the others have scales."""
    state: str = "kv"
    """`kv`: a K and a V vector for each head and token; `mla`: one latent vector for each token (one head, `head_dim` long)."""
    state_blocks: int = 0
    """The first blocks of each sequence, which have its recurrent state in place of tokens."""

    @property
    def num_planes(self) -> int:
        """Vectors of one head and token: K and V, or the latent."""
        return 1 if self.state == "mla" else 2

    @property
    def num_kept(self) -> int:
        """Numbers of a vector without a scale, among others that have some."""
        return 0 if self.scales == "none" else self.kept[1] - self.kept[0]

    @property
    def vector_bytes(self) -> int:
        """Bytes of one K or V vector of one head."""
        each = DTYPE_BYTES[self.dtype]
        return self.head_dim * each + self.num_kept * (DTYPE_BYTES["bfloat16"] - each)

    @property
    def slot_bytes(self) -> int:
        """Bytes of one token's K and V in one layer, without their scales."""
        return self.num_planes * self.num_kv_heads * self.vector_bytes

    @property
    def state_tokens(self) -> int:
        """How many tokens' places a sequence's recurrent state takes."""
        return self.state_blocks * self.block_size

    @property
    def token_bytes(self) -> int:
        """Bytes of one token's K and V over all layers and heads."""
        return self.num_planes * self.num_layers * self.num_kv_heads * (self.vector_bytes + self.scale_bytes)

    @property
    def scale_bytes(self) -> int:
        """Bytes of one vector's scales."""
        return SCALE_BYTES * self.num_scales

    @property
    def num_scales(self) -> int:
        """Scales of one vector."""
        if self.scales == "none":
            return 0
        return (self.head_dim - self.num_kept) // self.group if self.group else 1


@dataclass(frozen=True, slots=True)
class KVShard:
    """What one rank holds: layers [layers[0], layers[1]) and KV heads [heads[0], heads[1]) of `layout`."""

    layout: KVLayout
    layers: tuple[int, int]
    heads: tuple[int, int]

    @classmethod
    def whole(cls, layout: KVLayout) -> "KVShard":
        return cls(layout, (0, layout.num_layers), (0, layout.num_kv_heads))

    @property
    def num_layers(self) -> int:
        return self.layers[1] - self.layers[0]

    @property
    def num_heads(self) -> int:
        return self.heads[1] - self.heads[0]

    @property
    def block_bytes(self) -> int:
        """Bytes of one block of one layer: K and V of all local heads, without their scales."""
        return self.layout.num_planes * self.num_heads * self.layout.block_size * self.layout.vector_bytes

    @property
    def block_vectors(self) -> int:
        """K and V vectors in one block of one layer."""
        return self.block_bytes // self.layout.vector_bytes

    def data_bytes(self, num_blocks: int) -> int:
        """Where the scales begin, if there are any."""
        return self.num_layers * num_blocks * self.block_bytes

    def pool_bytes(self, num_blocks: int) -> int:
        num_vectors = self.num_layers * num_blocks * self.block_vectors
        return self.data_bytes(num_blocks) + num_vectors * self.layout.scale_bytes

    def blocks_at(self, num_blocks: int, start: int, end: int) -> range:
        """Return the blocks that the pool's bytes [start, end) belong to; empty when they are not all in the pool, in one
        layer."""
        base, stop, size = 0, self.data_bytes(num_blocks), self.block_bytes
        if start >= stop:
            base, stop = stop, self.pool_bytes(num_blocks)
            size = self.block_vectors * self.layout.scale_bytes
        if not base <= start < end <= stop:
            return range(0)
        first, last = (start - base) // size, (end - 1 - base) // size
        layer = first // num_blocks * num_blocks
        return range(first - layer, last - layer + 1) if last < layer + num_blocks else range(0)

    def offset(self, num_blocks: int, layer: int, block: int, is_value: int, head: int, slot: int) -> int:
        """Return the byte offset in a pool of `num_blocks` of one vector. `layer` and `head` are the model's, not local,
        indices."""
        local_layer, local_head = layer - self.layers[0], head - self.heads[0]
        row = (local_layer * num_blocks + block) * self.layout.num_planes + is_value
        return (
            (row * self.num_heads + local_head) * self.layout.block_size + slot
        ) * self.layout.vector_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPool:
    """The pool of one rank, in its instance's memory on the rank's host: `base_bytes` into it."""

    shard: KVShard
    num_blocks: int
    base_bytes: int = 0
    first_block: int = 0
    """The instance's number of the pool's first block. Ranks that serve other sequences hold other blocks."""
    memory: int = 0
    """The number of the host, within the instance, on which it lies; 0 is the instance's own."""

    @property
    def num_bytes(self) -> int:
        return self.shard.pool_bytes(self.num_blocks)

    def blocks_at(self, start: int, end: int) -> range:
        """Return the blocks, in the instance's numbers, of bytes of the memory that the pool lies in, as `KVShard.blocks_at`
        does."""
        found = self.shard.blocks_at(self.num_blocks, start - self.base_bytes, end - self.base_bytes)
        return range(found.start + self.first_block, found.stop + self.first_block)

    def holds(self, block: int) -> bool:
        """Return whether this block of the instance is in the pool."""
        return self.first_block <= block < self.first_block + self.num_blocks

    def local(self, blocks: Sequence[int]) -> tuple[int, ...]:
        """Return the pool's own numbers of blocks that it holds."""
        return tuple(block - self.first_block for block in blocks) if self.first_block else tuple(blocks)


def lay_out(
    shards: Sequence[KVShard], num_blocks: int, groups: Sequence[int] = (), memories: Sequence[int] = ()
) -> tuple[RankPool, ...]:
    """Lay the pools of an instance's ranks out, in each memory one behind the other, each from a page's beginning.

    Each has `num_blocks`: those of its group, which are numbered behind one another; without `groups` there is one. `memories`
    says in which memory each lies; none means all in one."""
    pools: list[RankPool] = []
    for rank, shard in enumerate(shards):
        first_block = groups[rank] * num_blocks if groups else 0
        memory = memories[rank] if memories else 0
        pools.append(
            RankPool(
                shard=shard,
                num_blocks=num_blocks,
                base_bytes=memory_bytes(pools, memory),
                first_block=first_block,
                memory=memory,
            )
        )
    return tuple(pools)


def memory_bytes(pools: Sequence[RankPool], memory: int = 0) -> int:
    """Return the bytes that the pools in this memory take, in whole pages."""
    ends = [pool.base_bytes + pool.num_bytes for pool in pools if pool.memory == memory]
    return -(-max(ends, default=0) // PAGE_BYTES) * PAGE_BYTES


def num_blocks_for(num_tokens: int, block_size: int) -> int:
    return -(-num_tokens // block_size)


def block_hashes(tokens: Sequence[int], block_size: int, salt: str = "") -> tuple[int, ...]:
    """Return the chained 64-bit hashes of the full blocks of `tokens`. Equal hashes mean (all but surely) equal prefixes.

    They are hints for routing only: before KV is shared the tokens themselves are compared."""
    return tuple(hash_chain(root_hash(salt), tokens, block_size))


def root_hash(salt: str) -> int:
    """Return what the chain of a tenant's block hashes begins with."""
    return int.from_bytes(hashlib.blake2b(salt.encode(), digest_size=8).digest(), "little")


def hash_chain(parent: int, tokens: Sequence[int], block_size: int) -> list[int]:
    """Return the hashes of the full blocks of `tokens`, the first of which follows a block with hash `parent`."""
    hashes: list[int] = []
    for start in range(0, len(tokens) - block_size + 1, block_size):
        packed = struct.pack(f"<Q{block_size}I", parent, *tokens[start : start + block_size])
        parent = int.from_bytes(hashlib.blake2b(packed, digest_size=8).digest(), "little")
        hashes.append(parent)
    return hashes
