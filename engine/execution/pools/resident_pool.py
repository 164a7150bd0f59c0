"""A KV pool in a device's memory: transports and lower tiers read and write it there.

Whoever is told of a layer orders itself behind the compute stream by an event. The compute stream waits only for reads of
blocks that may be written by now.

Where steps are captured the last block of the layout is nobody's: rows that only fill up a step write there."""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from core.kv import KVShard
from core.plan import BlockCopy, StepPlan
from device.port import PoolMemory
from device.seam import Region
from engine.execution.pools.kv_pool import copy_slots, layers_of, pool_parts
from engine.execution.pools.layer_marks import LayerMarks


class ResidentPool:
    """engine.execution.pools.kv_pool.DevicePool. For the compute thread."""

    def __init__(self, shard: KVShard, num_blocks: int, memory: PoolMemory, device: torch.device) -> None:
        """`num_blocks` counts a block that is nobody's, too. `device` is torch's name of the memory's."""
        flat = torch.as_tensor(memory.device.array(memory.region), device=device)
        self._parts = pool_parts(shard, num_blocks, flat)
        self._shard, self._num_blocks, self._memory = shard, num_blocks, memory
        self._compute = memory.device.compute
        self._reading: tuple[int, ...] = ()
        self.empty_block = num_blocks - 1
        self.device = device
        self.layers = layers_of(shard, self._parts)
        self.is_told = memory.device.asks_for_uses

    def begin(self, plan: StepPlan) -> None:
        self._memory.order(self._compute)
        if self.is_told:
            self._reading = tuple(dict.fromkeys(block for item in plan.work for block in item.block_ids))

    def copy_blocks(self, copies: Sequence[BlockCopy]) -> None:
        for copy in copies:
            self._compute.uses(self._in_all((copy.src,)), self._in_all((copy.dst,)))
        copy_slots(self._parts, copies)

    def written(self, layer: int, slots: Tensor) -> None:
        self._compute.uses(self._blocks(layer, self._reading), self._slots(layer, slots))

    def written_in_all(self, slots: Tensor) -> None:
        """As `written`, in all layers at once."""
        self._compute.uses(
            self._in_all(self._reading),
            (region for layer in range(self._shard.num_layers) for region in self._slots(layer, slots)),
        )

    def layer_marks(self) -> LayerMarks:
        """Return new marks for captured steps that write this pool."""
        return LayerMarks(self._memory.device, self.device, range(*self._shard.layers))

    def finish(self) -> None:
        # The step's result lets its blocks be kept and given away, and says how long the step took, so the stream must have come
        # this far. Where tokens were sampled, it has: their copy to the host has been waited for.
        self._memory.poller.wait([self._compute.record()])

    def _in_all(self, blocks: Sequence[int]) -> Iterator[Region]:
        for layer in range(self._shard.num_layers):
            yield from self._blocks(layer, blocks)

    def _blocks(self, layer: int, blocks: Sequence[int]) -> Iterator[Region]:
        for block in blocks:
            yield from self._vectors(layer, block * self._shard.block_vectors, self._shard.block_vectors)

    def _slots(self, layer: int, slots: Tensor) -> Iterator[Region]:
        shard, size = self._shard, self._shard.layout.block_size
        for slot in slots.tolist():
            block, offset = divmod(slot, size)
            for row in range(shard.layout.num_planes * shard.num_heads):
                yield from self._vectors(layer, block * shard.block_vectors + row * size + offset, 1)

    def _vectors(self, layer: int, first: int, count: int) -> Iterator[Region]:
        """Vectors of a layer, and their scales."""
        layout, region = self._shard.layout, self._memory.region
        first += layer * self._num_blocks * self._shard.block_vectors
        yield region.part(first * layout.vector_bytes, count * layout.vector_bytes)
        if layout.scale_bytes:
            base = self._shard.data_bytes(self._num_blocks)
            yield region.part(base + first * layout.scale_bytes, count * layout.scale_bytes)
