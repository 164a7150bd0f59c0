"""Which bytes of a source shard go where in a destination shard.

The two may differ in block size, in the layers and in the KV heads that they hold, and in dtype. Everything is planned in
vectors (one head's K or V of one token), which exist on both sides whatever they are stored as. Invariant: over all pairs of
shards every vector of the pushed tokens is written exactly once and nothing else is touched."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from core.kv import KVShard

Ints = npt.NDArray[np.int64]
VectorRuns = npt.NDArray[np.int64]
"""(runs, 3): `count` vectors from the `source`-th of the source pool on go to the `destination`-th of the destination pool on.

Sides that differ in heads or block size have a run for each head and block, thousands for a long prompt, and each layer moves
them again: so they are numbers in one array."""


class CopyRun(NamedTuple):
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

    def first_vectors(self, tokens: Ints, heads: tuple[int, int]) -> Ints:
        """Return (tokens, planes, heads): the pool's number of each vector in the first layer."""
        layout, index = self.shard.layout, tokens - self.first_token
        blocks = np.asarray(self.block_ids, np.int64)[index // layout.block_size]
        planes, of_heads = np.arange(layout.num_planes), np.arange(*heads) - self.shard.heads[0]
        rows = planes[:, None] * self.shard.num_heads + of_heads
        at = blocks * self.shard.block_vectors + index % layout.block_size
        return at[:, None, None] + rows * layout.block_size


def plan_vectors(source: Side, destination: Side, start: int, count: int) -> VectorRuns:
    """Return the runs for tokens [start, start + count) of the first layer that each side holds. `at_layer` moves them to other
    layers.

    Neighbouring runs are joined, so a sequence in consecutive blocks is one run a layer."""
    heads = _shared(source.shard.heads, destination.shard.heads)
    if count <= 0 or heads[0] >= heads[1]:
        return np.empty((0, 3), np.int64)
    tokens, lengths = _segments(source, destination, start, count)
    down, up = (side.first_vectors(tokens, heads) for side in (source, destination))
    counts = np.broadcast_to(lengths[:, None, None], down.shape)
    return _joined(down.reshape(-1), up.reshape(-1), counts.reshape(-1))


def at_layer(runs: VectorRuns, source: Side, destination: Side, layer: int) -> VectorRuns:
    """Return the runs of `plan_vectors` for model layer `layer`; none when the destination does not hold it."""
    if not destination.shard.layers[0] <= layer < destination.shard.layers[1]:
        return runs[:0]
    down = (layer - source.shard.layers[0]) * source.layer_vectors
    up = (layer - destination.shard.layers[0]) * destination.layer_vectors
    return runs + np.array([down, up, 0])


def as_bytes(runs: VectorRuns, source: Side, destination: Side) -> list[CopyRun]:
    """Return the byte runs of data, and of scales where there are any, between two sides that store vectors alike."""
    layout = source.shard.layout
    copies = byte_runs(runs, layout.vector_bytes, source.base_bytes, destination.base_bytes)
    if layout.scale_bytes:
        copies += byte_runs(runs, layout.scale_bytes, source.scales_bytes, destination.scales_bytes)
    return copies


def byte_runs(runs: VectorRuns, item_bytes: int, source: int, destination: int) -> list[CopyRun]:
    """Return the bytes of the runs' items, which begin at `source` in the one memory and at `destination` in the other."""
    return [CopyRun(*run) for run in (runs * item_bytes + np.array([source, destination, 0])).tolist()]


def group_vectors(runs: VectorRuns, capacity: int) -> list[VectorRuns]:
    """Split the runs, in order, into groups of `capacity` vectors (the last may have fewer); a run may be cut."""
    if not len(runs):
        return []
    ends = np.cumsum(runs[:, 2])
    starts = np.union1d(np.append(ends[:-1], 0), np.arange(0, ends[-1], capacity))
    run = np.searchsorted(ends, starts, side="right")
    done = starts - ends[run] + runs[run, 2]
    lengths = np.diff(np.append(starts, ends[-1]))
    pieces = np.stack([runs[run, 0] + done, runs[run, 1] + done, lengths], axis=1)
    return np.split(pieces, np.flatnonzero(np.diff(starts // capacity)) + 1)


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


def _segments(source: Side, destination: Side, start: int, count: int) -> tuple[Ints, Ints]:
    """Cut the tokens where a block of either side ends. Returns the first token of each piece, and its length."""
    end, cuts = start + count, [np.array([start])]
    for side in (source, destination):
        size = side.shard.layout.block_size
        next_block = side.first_token + ((start - side.first_token) // size + 1) * size
        cuts.append(np.arange(next_block, end, size))
    tokens = np.unique(np.concatenate(cuts))
    return tokens, np.diff(np.append(tokens, end))


def _joined(source: Ints, destination: Ints, counts: Ints) -> VectorRuns:
    """Join each run with those that go on where it ends, on both sides."""
    begins = np.ones(len(counts), bool)
    begins[1:] = (source[1:] != (source + counts)[:-1]) | (destination[1:] != (destination + counts)[:-1])
    at = np.flatnonzero(begins)
    return np.stack([source[at], destination[at], np.add.reduceat(counts, at)], axis=1)
