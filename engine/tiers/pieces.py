"""One KV block as the ranks that hold it do: a piece of each one's pool, all in the memory of their instance.

Invariant: ranks either hold the same of a block or nothing in common, so each different piece is kept once, and put back
wherever it belongs. Ranks that serve other sequences hold other blocks, cut alike."""

from collections.abc import Iterator, Sequence

from core.kv import KVShard, RankPool


class BlockPieces:
    """`memory` is what the ranks' `pools` lie in. A block's content is its different pieces, in the order of the ranks."""

    def __init__(self, memory: memoryview, pools: Sequence[RankPool]) -> None:
        self._memory = memory
        self._holders: dict[KVShard, list[RankPool]] = {}
        for pool in pools:
            self._holders.setdefault(pool.shard, []).append(pool)

    @property
    def num_bytes(self) -> int:
        """Of a block's content."""
        return sum(shard.pool_bytes(1) for shard in self._holders)

    @property
    def fingerprint(self) -> bytes:
        """Equal for contents that lie alike."""
        return "|".join(str(shard) for shard in self._holders).encode()

    def gather(self, block: int) -> bytes:
        first = (next(pool for pool in pools if pool.holds(block)) for pools in self._holders.values())
        return b"".join(self._memory[start:end] for pool in first for start, end in _spans(pool, block))

    @property
    def layers(self) -> range:
        """Of the model, as far as any rank holds them."""
        return range(
            min(shard.layers[0] for shard in self._holders), max(shard.layers[1] for shard in self._holders)
        )

    def scatter_layer(self, layer: int, block: int, content: memoryview) -> None:
        """Put a layer of a block back wherever it belongs. `content`: the whole block's, of `num_bytes`."""
        base = 0
        for shard, pools in self._holders.items():
            if shard.layers[0] <= layer < shard.layers[1]:
                for pool in filter(lambda pool: pool.holds(block), pools):
                    self._put_layer(pool, layer - shard.layers[0], block - pool.first_block, content, base)
            base += shard.pool_bytes(1)

    def _put_layer(self, pool: RankPool, row: int, block: int, content: memoryview, base: int) -> None:
        shard, num_blocks = pool.shard, pool.num_blocks
        scales_bytes = shard.block_vectors * shard.layout.scale_bytes
        for theirs, ours, size in (
            (0, 0, shard.block_bytes),
            (shard.data_bytes(1), shard.data_bytes(num_blocks), scales_bytes),
        ):
            start = pool.base_bytes + ours + (row * num_blocks + block) * size
            at = base + theirs + row * size
            self._memory[start : start + size] = content[at : at + size]


def _spans(pool: RankPool, block: int) -> Iterator[tuple[int, int]]:
    """The memory's bytes [start, end) of a rank's block, layer by layer, and of its scales where it has some."""
    shard, num_blocks = pool.shard, pool.num_blocks
    scales_bytes = shard.block_vectors * shard.layout.scale_bytes
    for base, size in ((0, shard.block_bytes), (shard.data_bytes(num_blocks), scales_bytes)):
        for row in range(block - pool.first_block, shard.num_layers * num_blocks if size else 0, num_blocks):
            start = pool.base_bytes + base + row * size
            yield start, start + size
