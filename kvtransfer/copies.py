"""Which bytes of a source shard go where in a destination shard.

The two may differ in block size, in the layers and in the KV heads that they hold, and in dtype. Everything is planned in
vectors (one head's K or V of one token), which exist on both sides whatever they are stored as. Invariant: over all pairs of
shards every vector of the pushed tokens is written exactly once and nothing else is touched."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from core.kv import KVShard


@dataclass(frozen=True, slots=True)
class CopyRun:
    """Bytes [source, source + num_bytes) of the source pool go to [destination, ...) of the destination pool."""

    source: int
    destination: int
    num_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """One pool and a sequence's blocks in it. `block_ids` covers tokens from `first_token`, a multiple of the block size."""

    shard: KVShard
    num_blocks: int
    block_ids: Sequence[int]
    first_token: int = 0
    base_bytes: int = 0
    """Where the pool begins in its memory."""

    @property
    def layer_vectors(self) -> int:
        return self.num_blocks * self.shard.block_vectors

    @property
    def scales_bytes(self) -> int:
        """Where the scales begin in the memory, if there are any."""
        return self.base_bytes + self.shard.data_bytes(self.num_blocks)

    def place(self, token: int) -> tuple[int, int]:
        """Return the block and slot of a token."""
        index = token - self.first_token
        size = self.shard.layout.block_size
        return self.block_ids[index // size], index % size


@dataclass(frozen=True, slots=True)
class VectorRun:
    """`count` vectors from the `source`-th of the source pool on go to the `destination`-th of the destination pool on."""

    source: int
    destination: int
    count: int


def plan_vectors(source: Side, destination: Side, start: int, count: int) -> list[VectorRun]:
    """Return the runs for tokens [start, start + count) of the first layer that each side holds. `at_layer` moves them to other
    layers.

    Neighbouring runs are joined, so a sequence in consecutive blocks is one run a layer."""
    heads = _shared(source.shard.heads, destination.shard.heads)
    runs: list[VectorRun] = []
    for token, length in _segments(source, destination, start, count):
        for run in _segment_runs(source, destination, token, length, heads):
            last = runs[-1] if runs else None
            if (
                last is not None
                and last.source + last.count == run.source
                and last.destination + last.count == run.destination
            ):
                runs[-1] = VectorRun(last.source, last.destination, last.count + run.count)
            else:
                runs.append(run)
    return runs


def at_layer(runs: Sequence[VectorRun], source: Side, destination: Side, layer: int) -> list[VectorRun]:
    """Return the runs of `plan_vectors` for model layer `layer`; none when the destination does not hold it."""
    if not destination.shard.layers[0] <= layer < destination.shard.layers[1]:
        return []
    down = (layer - source.shard.layers[0]) * source.layer_vectors
    up = (layer - destination.shard.layers[0]) * destination.layer_vectors
    return [VectorRun(run.source + down, run.destination + up, run.count) for run in runs]


def as_bytes(runs: Sequence[VectorRun], source: Side, destination: Side) -> list[CopyRun]:
    """Return the byte runs of data, and of scales where there are any, between two sides that store vectors alike."""
    size, scale = source.shard.layout.vector_bytes, source.shard.layout.scale_bytes
    down, up = source.base_bytes, destination.base_bytes
    copies = [
        CopyRun(down + run.source * size, up + run.destination * size, run.count * size) for run in runs
    ]
    if scale:
        down, up = source.scales_bytes, destination.scales_bytes
        copies += [
            CopyRun(down + run.source * scale, up + run.destination * scale, run.count * scale)
            for run in runs
        ]
    return copies


def duties(sources: Sequence[KVShard], destinations: Sequence[KVShard]) -> list[list[int]]:
    """Return, for each source rank, the destination ranks that it writes to.

    Ranks may hold the same shard (a latent cache, or fewer KV heads than ranks). One of those sources serves each destination, in
    turn, so that every vector of every destination is written once and the ranks share the work."""
    found: list[list[int]] = [[] for _ in sources]
    for number, destination in enumerate(destinations):
        groups: dict[tuple[tuple[int, int], tuple[int, int]], list[int]] = {}
        for rank, source in enumerate(sources):
            layers, heads = (
                _shared(source.layers, destination.layers),
                _shared(source.heads, destination.heads),
            )
            if layers[0] < layers[1] and heads[0] < heads[1]:
                groups.setdefault((source.layers, source.heads), []).append(rank)
        for ranks in groups.values():
            found[ranks[number % len(ranks)]].append(number)
    return found


def same_storage(source: KVShard, destination: KVShard) -> bool:
    """Return whether vectors can be copied as they are stored."""
    a, b = source.layout, destination.layout
    return (a.dtype, a.scales) == (b.dtype, b.scales)


def split_runs(runs: Sequence[CopyRun], num_parts: int, min_part_bytes: int) -> list[list[CopyRun]]:
    """Split the runs into at most `num_parts` groups of about equal size, each of at least `min_part_bytes`; a run may be cut.
    There is a single group where there is less than two such parts."""
    total = sum(run.num_bytes for run in runs)
    num_parts = max(1, min(num_parts, total // max(1, min_part_bytes)))
    if num_parts == 1:
        return [list(runs)]
    return chunk_runs(runs, -(-total // num_parts))


def chunk_runs(runs: Sequence[CopyRun], max_bytes: int) -> list[list[CopyRun]]:
    """Split the runs, in order, into groups of `max_bytes` (the last may be smaller); a run may be cut."""
    groups: list[list[CopyRun]] = []
    room = 0
    for run in runs:
        start = 0
        while start < run.num_bytes:
            if not room:
                groups.append([])
                room = max_bytes
            size = min(room, run.num_bytes - start)
            groups[-1].append(CopyRun(run.source + start, run.destination + start, size))
            start, room = start + size, room - size
    return groups


def _shared(a: tuple[int, int], b: tuple[int, int]) -> tuple[int, int]:
    return max(a[0], b[0]), min(a[1], b[1])


def _segments(source: Side, destination: Side, start: int, count: int) -> Iterator[tuple[int, int]]:
    """Cut the tokens where a block of either side ends."""
    token, end = start, start + count
    sizes = source.shard.layout.block_size, destination.shard.layout.block_size
    while token < end:
        left = min(
            size - (token - side.first_token) % size
            for size, side in zip(sizes, (source, destination), strict=True)
        )
        length = min(left, end - token)
        yield token, length
        token += length


def _segment_runs(
    source: Side, destination: Side, token: int, length: int, heads: tuple[int, int]
) -> Iterator[VectorRun]:
    """Return one run for each plane (K, V, or the one of a latent cache) and head, or one for a whole block that is laid out
    alike."""
    (from_block, from_slot), (to_block, to_slot) = source.place(token), destination.place(token)
    same_heads = source.shard.heads == destination.shard.heads
    same_size = source.shard.layout.block_size == destination.shard.layout.block_size
    if same_heads and same_size and length == source.shard.layout.block_size:
        size = source.shard.block_vectors
        yield VectorRun(from_block * size, to_block * size, size)
        return
    for plane in range(source.shard.layout.num_planes):
        for head in range(*heads):
            yield VectorRun(
                _vector(source.shard, from_block, plane, head, from_slot),
                _vector(destination.shard, to_block, plane, head, to_slot),
                length,
            )


def _vector(shard: KVShard, block: int, plane: int, head: int, slot: int) -> int:
    """Return the index of a vector of the shard's first layer."""
    row = plane * shard.num_heads + head - shard.heads[0]
    return block * shard.block_vectors + row * shard.layout.block_size + slot
