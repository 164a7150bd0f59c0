"""The witness over a pool in the memory of a simulated device (`device/simulated.py`), which says what it reads and writes there."""

from collections.abc import Iterator

import numpy as np

from cluster.instance.device_access import take_device_memory
from core.plan import StepPlan, StepResult
from core.ports import DeviceWork, LayerDone, LayerSink
from device.port import PoolMemory
from device.seam import Region
from device.simulated import SimulatedDevice
from tests.chaos.witness import LAYOUT, SHARD, WitnessRank

_ROWS = 2 * LAYOUT.num_kv_heads
_VECTOR_BYTES = LAYOUT.head_dim * 4
_BLOCK_BYTES = _ROWS * LAYOUT.block_size * _VECTOR_BYTES


def simulated_memory(num_blocks: int, seed: int) -> tuple[PoolMemory, SimulatedDevice]:
    device = SimulatedDevice(seed)
    return take_device_memory(device, SHARD.pool_bytes(num_blocks)), device


class DeviceWitnessRank(WitnessRank):
    """Its steps wait for what `engine.execution.pools.resident_pool.ResidentPool` has a step wait for."""

    def __init__(self, memory: PoolMemory, num_blocks: int, sink: LayerSink | None, layer_s: float) -> None:
        pool = np.asarray(memory.device.array(memory.region))
        super().__init__(pool.data[: SHARD.pool_bytes(num_blocks)], num_blocks, sink, layer_s)
        self._memory, self._num_blocks = memory, num_blocks

    def step(self, plan: StepPlan) -> StepResult:
        compute = self._memory.device.compute
        self._memory.order(compute)
        for copy in plan.copies:
            compute.uses(self._slots(copy.src, copy.num_tokens), self._slots(copy.dst, copy.num_tokens))
        result = super().step(plan)
        for work in plan.work:
            if work.samples:
                for block in work.block_ids[: -(-(work.start + work.count) // LAYOUT.block_size)]:
                    compute.uses(self._slots(block, LAYOUT.block_size), ())
        self._memory.poller.wait([compute.record()])
        return result

    def _started(self, plan: StepPlan) -> LayerDone:
        """Return what is called when a layer has been written."""
        told = super()._started(plan)

        def layer_done(rank: int, layer: int, after: DeviceWork | None = None) -> None:
            for work in plan.work:
                for position in range(work.start, work.start + work.count):
                    block, slot = divmod(position, LAYOUT.block_size)
                    rows = self._rows(layer, work.block_ids[block], slot, 1)
                    self._memory.device.compute.uses((), rows)
            told(rank, layer, after)

        return layer_done

    def _slots(self, block: int, num_tokens: int) -> Iterator[Region]:
        for layer in range(LAYOUT.num_layers):
            yield from self._rows(layer, block, 0, num_tokens)

    def _rows(self, layer: int, block: int, slot: int, num_tokens: int) -> Iterator[Region]:
        first = (layer * self._num_blocks + block) * _BLOCK_BYTES
        for row in range(_ROWS):
            at = first + (row * LAYOUT.block_size + slot) * _VECTOR_BYTES
            yield self._memory.region.part(at, num_tokens * _VECTOR_BYTES)
