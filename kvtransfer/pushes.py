"""The pusher's state: grants that are being filled, the chunks of a step, and what waits to go out."""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from core.kv import KVLayout, RankPool
from core.messages import ChunkDone, Grant, HandoverTimes, RegionKey
from core.plan import KVPush
from device.seam import Event
from kvtransfer.copies import Side, VectorRuns, plan_vectors
from kvtransfer.linkqueue import Urgency
from kvtransfer.transport.base import Carried, Sender

_LONG_WRITE_BYTES = 8 << 20
"""Layers that have queued up go out together up to this size."""


@dataclass(slots=True, eq=False, kw_only=True)
class ActivePush:
    """One grant that is being filled."""

    grant: Grant
    ways: list[list[tuple[Sender, RegionKey]]]
    """The transport from each memory of the writer that has pools to each of the holder's ranks."""
    urgency: Urgency
    on_delivered: Callable[[str], None]
    on_quiet: Callable[[str], None]
    on_failed: Callable[[str, str], None]
    opened_at: float
    duties: list[list[int]]
    """For each rank of the writer the targets that it writes to."""
    started_at: float | None = None
    """When the first step with its prompt started."""
    written_at: float | None = None
    """When its first write ended."""
    closing: bool = False
    """Whether it ends when its writes do. Nothing that is computed from now on is sent."""
    stopped: bool = False
    reason: str | None = None
    """Why it failed, if the holder is to be told."""
    num_chunks: int = 0
    num_bytes: int = 0
    """Bytes of all writes that have been queued, as the holder stores them."""
    queued_bytes: int = 0
    num_writes: int = 0
    """The number of writes that are queued or under way."""
    writing_since: list[float] = field(default_factory=list[float])
    """When each write under way began."""
    unfinished: list["Chunk"] = field(default_factory=list["Chunk"])
    """Chunks that the holder has not been told of yet."""
    on_idle: list[Callable[[], None]] = field(default_factory=list[Callable[[], None]])
    """What is called when nothing is being written, nor waits to be."""

    @property
    def transport(self) -> str:
        return next(pairs[0][0].name for pairs in self.ways if pairs)

    def carried(self) -> Carried | None:
        """Return what has arrived over all ways to the holder. None where the end of a write says it."""
        found = [sender.carried(region) for pairs in self.ways for sender, region in pairs]
        told = [one for one in found if one is not None]
        return Carried(sum(one.num_bytes for one in told), max(one.busy_s for one in told)) if told else None

    def times(self) -> HandoverTimes:
        opened_at = self.opened_at
        return HandoverTimes(
            self.transport,
            (self.started_at or opened_at) - opened_at,
            (self.written_at or opened_at) - opened_at,
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TargetPlan:
    """The part of a chunk that goes from one of our ranks to one of the holder's, for the first layer."""

    sender: Sender
    region: RegionKey
    source: Side
    side: Side
    runs: VectorRuns
    num_vectors: int

    @property
    def layer_bytes(self) -> int:
        return self._num_bytes(self.source.shard.layout)

    def written_bytes(self, layer: int) -> int:
        """Return the bytes of a model layer that arrive at a holder, which may store it otherwise or not hold it."""
        shard = self.side.shard
        return self._num_bytes(shard.layout) if shard.layers[0] <= layer < shard.layers[1] else 0

    def _num_bytes(self, layout: KVLayout) -> int:
        return self.num_vectors * (layout.vector_bytes + layout.scale_bytes)


@dataclass(slots=True, eq=False, kw_only=True)
class Chunk:
    """The pushed part of one sequence's work in a step."""

    push: ActivePush
    seq: int
    first_token: int
    num_tokens: int
    plans: dict[int, list[TargetPlan]]
    """The plans of each of our ranks that holds the sequence."""
    num_left: int
    """The number of layers that are still to be written, over all ranks."""
    vouched_bytes: int = 0

    def layer_bytes(self, rank: int) -> int:
        return sum(plan.layer_bytes for plan in self.plans[rank])

    def done(self) -> ChunkDone:
        return ChunkDone(
            grant_id=self.push.grant.id,
            seq=self.seq,
            first_token=self.first_token,
            num_tokens=self.num_tokens,
            num_bytes=self.vouched_bytes,
        )


@dataclass(slots=True, eq=False)
class LinkWrite:
    chunk: Chunk
    rank: int
    layer: int
    after: tuple[Event, ...] = ()
    """Done once the layer is in the pool; none: it is there."""

    @property
    def num_bytes(self) -> int:
        return self.chunk.layer_bytes(self.rank)

    @property
    def written_bytes(self) -> int:
        return sum(plan.written_bytes(self.layer) for plan in self.chunk.plans[self.rank])


def plan_target(
    pool: RankPool,
    push: ActivePush,
    target: int,
    block_ids: Sequence[int],
    part: KVPush,
) -> TargetPlan:
    """Plan the copies of `part`, in the instance's blocks `block_ids`, to the target of that number."""
    sender, region = push.ways[pool.memory][target]
    grant = push.grant
    blocks = pool.local(block_ids)
    source = Side(shard=pool.shard, num_blocks=pool.num_blocks, block_ids=blocks, base_bytes=pool.base_bytes)
    side = Side(
        shard=region.shard,
        num_blocks=region.num_blocks,
        block_ids=grant.block_ids,
        first_token=grant.first_token,
        base_bytes=region.base_bytes,
    )
    runs = [
        plan_vectors(source, side, 0, part.state_tokens),
        plan_vectors(source, side, part.start, part.count),
    ]
    return TargetPlan(
        sender=sender,
        region=region,
        source=source,
        side=side,
        runs=np.concatenate(runs),
        num_vectors=sum(int(found[:, 2].sum()) for found in runs),
    )


def take_writes(items: deque[LinkWrite]) -> list[LinkWrite]:
    """Take as many layers from the left as make one long write."""
    taken = [items.popleft()]
    num_bytes = taken[0].num_bytes
    while items and (num_bytes := num_bytes + items[0].num_bytes) <= _LONG_WRITE_BYTES:
        taken.append(items.popleft())
    return taken
