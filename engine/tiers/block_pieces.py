"""One KV block as the pieces of it that ranks hold, in the memory of their instance or in one for each of them.

Invariant: ranks hold either the same part of a block or nothing in common. So each different piece is kept once, and put back
wherever it belongs. Ranks that serve other sequences hold other blocks, cut alike."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial

from core.kv import KVShard, RankPool
from device.port import PoolMemory
from engine.tiers.pool_bytes import PoolBytes, bytes_of_pool


def block_bytes(pools: Sequence[RankPool]) -> int:
    """Return the bytes of a block's different pieces in these pools."""
    return sum(shard.pool_bytes(1) for shard in dict.fromkeys(pool.shard for pool in pools))


class BlockPieces:
    """The pieces of a block in the memories in which the ranks' `pools` lie.

    A block's content is its different pieces, in rank order."""

    def __init__(
        self,
        memory: memoryview | PoolMemory,
        pools: Sequence[RankPool],
        remote: Mapping[int, PoolBytes] | None = None,
    ) -> None:
        """`memory` is this process's, number 0, the host's or a device's. `remote` has the others, by number."""
        self._holders: dict[KVShard, list[RankPool]] = {}
        for pool in pools:
            self._holders.setdefault(pool.shard, []).append(pool)
        self._bytes = {0: bytes_of_pool(memory, self.num_bytes), **(remote or {})}

    @property
    def num_bytes(self) -> int:
        """The bytes of a block's content."""
        return block_bytes([pools[0] for pools in self._holders.values()])

    @property
    def fingerprint(self) -> bytes:
        """A name of the layout, equal for contents that are laid out alike."""
        return "|".join(str(shard) for shard in self._holders).encode()

    def save(self, block: int, then: Callable[[bytes], None]) -> None:
        """Copy a block out; on return it may be overwritten. `then` gets its content on the event loop's thread."""
        spans: list[tuple[int, int, int, int]] = []
        base = 0
        for shard, pools in self._holders.items():
            holder = next(pool for pool in pools if pool.holds(block))
            for row in range(shard.num_layers):
                spans += (
                    (base + at, holder.memory, start, size) for start, at, size in _spans(holder, block, row)
                )
            base += shard.pool_bytes(1)
        spans.sort()
        found: dict[int, bytes] = {}
        memories = sorted({memory for _, memory, _, _ in spans})

        def saved(memory: int, content: bytes) -> None:
            found[memory] = content
            if len(found) == len(memories):
                then(_merged(found, [(own, size) for _, own, _, size in spans]))

        for memory in memories:
            ranges = [(start, size) for _, own, start, size in spans if own == memory]
            self._bytes[memory].save(ranges, partial(saved, memory))

    def scatter(self, block: int, content: memoryview) -> None:
        """Put a block back wherever it belongs. `content` has `num_bytes`."""
        base = 0
        for shard, pools in self._holders.items():
            for pool in pools:
                if pool.holds(block):
                    # A pool at a time: a memory may have room for one piece on its way.
                    self._bytes[pool.memory].write(
                        [
                            (start, content[base + at : base + at + size])
                            for row in range(shard.num_layers)
                            for start, at, size in _spans(pool, block, row)
                        ]
                    )
            base += shard.pool_bytes(1)

    def close(self) -> None:
        """Close, once nothing is on its way. Blocks."""
        for each in self._bytes.values():
            each.close()


def _merged(found: Mapping[int, bytes], spans: Sequence[tuple[int, int]]) -> bytes:
    """Return the spans, (memory, bytes) each, one behind the other; each memory has its own in this order."""
    if len(found) == 1:
        return next(iter(found.values()))
    places = dict.fromkeys(found, 0)
    parts: list[bytes] = []
    for memory, size in spans:
        parts.append(found[memory][places[memory] : places[memory] + size])
        places[memory] += size
    return b"".join(parts)


def _spans(pool: RankPool, block: int, row: int) -> Iterator[tuple[int, int, int]]:
    """Yield the spans of the row-th layer that the rank holds, its vectors and then its scales: (where in memory, where in the
    rank's piece of a block's content, bytes)."""
    shard, num_blocks = pool.shard, pool.num_blocks
    index = row * num_blocks + block - pool.first_block
    scales_bytes = shard.block_vectors * shard.layout.scale_bytes
    yield pool.base_bytes + index * shard.block_bytes, row * shard.block_bytes, shard.block_bytes
    yield (
        pool.base_bytes + shard.data_bytes(num_blocks) + index * scales_bytes,
        shard.data_bytes(1) + row * scales_bytes,
        scales_bytes,
    )
