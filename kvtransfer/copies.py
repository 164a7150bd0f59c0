"""Which bytes of a source shard go where in a destination shard. Pure.

The two may differ in block size, in the layers and in the KV heads that they hold. Invariant: over all pairs of shards every
element of the pushed tokens is written exactly once and nothing else is touched."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from core.kv import KVShard


@dataclass(frozen=True, slots=True)
class CopyRun:
    """Bytes [source, source + num_bytes) of the source pool go to [destination, ...) of the destination pool."""

    source: int
    destination: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Side:
    """One pool and a sequence's blocks in it. `block_ids` covers tokens from `first_token`, a multiple of the block size."""

    shard: KVShard
    num_blocks: int
    block_ids: Sequence[int]
    first_token: int = 0

    @property
    def layer_bytes(self) -> int:
        return self.num_blocks * self.shard.block_bytes

    def place(self, token: int) -> tuple[int, int]:
        """The block and slot of a token."""
        index = token - self.first_token
        size = self.shard.layout.block_size
        return self.block_ids[index // size], index % size


def plan_copies(source: Side, destination: Side, start: int, count: int) -> list[CopyRun]:
    """Runs for tokens [start, start + count) of the first layer that the source holds; `shift` moves them to others.

    Neighbouring runs are joined, so that a sequence in consecutive blocks is one copy a layer."""
    heads = _shared(source.shard.heads, destination.shard.heads)
    runs: list[CopyRun] = []
    for token, length in _segments(source, destination, start, count):
        for run in _segment_runs(source, destination, token, length, heads):
            last = runs[-1] if runs else None
            if (
                last is not None
                and last.source + last.num_bytes == run.source
                and last.destination + last.num_bytes == run.destination
            ):
                runs[-1] = CopyRun(last.source, last.destination, last.num_bytes + run.num_bytes)
            else:
                runs.append(run)
    return runs


def shift(runs: Sequence[CopyRun], source: Side, destination: Side, layer: int) -> list[CopyRun]:
    """The runs of `plan_copies` for model layer `layer`; none when the destination does not hold it."""
    if not destination.shard.layers[0] <= layer < destination.shard.layers[1]:
        return []
    from_bytes = (layer - source.shard.layers[0]) * source.layer_bytes
    to_bytes = (layer - destination.shard.layers[0]) * destination.layer_bytes
    return [CopyRun(run.source + from_bytes, run.destination + to_bytes, run.num_bytes) for run in runs]


def split_runs(runs: Sequence[CopyRun], num_parts: int, min_part_bytes: int) -> list[list[CopyRun]]:
    """The runs in at most `num_parts` groups of about equal size, cutting runs in two, each of at least `min_part_bytes`.

    A single group where there is less than two such parts."""
    total = sum(run.num_bytes for run in runs)
    num_parts = max(1, min(num_parts, total // max(1, min_part_bytes)))
    if num_parts == 1:
        return [list(runs)]
    quota = -(-total // num_parts)
    parts: list[list[CopyRun]] = [[]]
    room = quota
    for run in runs:
        start = 0
        while start < run.num_bytes:
            if not room:
                parts.append([])
                room = quota
            size = min(room, run.num_bytes - start)
            parts[-1].append(CopyRun(run.source + start, run.destination + start, size))
            start += size
            room -= size
    return parts


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
) -> Iterator[CopyRun]:
    (from_block, from_slot), (to_block, to_slot) = source.place(token), destination.place(token)
    same_heads = source.shard.heads == destination.shard.heads
    same_size = source.shard.layout.block_size == destination.shard.layout.block_size
    if same_heads and same_size and length == source.shard.layout.block_size:
        size = source.shard.block_bytes
        yield CopyRun(from_block * size, to_block * size, size)
        return
    num_bytes = length * source.shard.layout.vector_bytes
    for is_value in (0, 1):
        for head in range(*heads):
            yield CopyRun(
                source.shard.offset(
                    source.num_blocks, source.shard.layers[0], from_block, is_value, head, from_slot
                ),
                destination.shard.offset(
                    destination.num_blocks, destination.shard.layers[0], to_block, is_value, head, to_slot
                ),
                num_bytes,
            )
