"""Vectors of a pool on a device are converted there, behind the layer that they are of."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from unittest.mock import Mock

import numpy as np
import pytest

from core.errors import Bug
from core.kv import KVLayout, KVShard, RankPool
from core.messages import RegionKey
from device.convert import convert
from device.poller import Poller
from device.port import HostPort, PoolMemory
from device.ring import Slot
from device.seam import Event
from device.simulated import SimulatedDevice
from kvtransfer.copies import CopyRun
from kvtransfer.staging import DeviceStaging
from kvtransfer.transport.base import Sender

OURS = KVLayout(num_layers=2, num_kv_heads=1, head_dim=4, block_size=4, dtype="float32")
THEIRS = replace(OURS, dtype="int8", scales="vector")
POOL = RankPool(shard=KVShard.whole(OURS), num_blocks=5)
HOLDER = KVShard.whole(THEIRS)
REGION = RegionKey(transport="tcp", endpoint="holder", name="baton-kv-1", host="", shard=HOLDER, num_blocks=5)
RUNS = np.array([[40, 3, 5], [2, 60, 7]])


class Written:
    """A Source that reads on the host what its sender would, once it is asked to."""

    def __init__(self, memory: PoolMemory) -> None:
        self._port = HostPort(memory, "written", 1 << 10)
        self.found = bytearray(HOLDER.pool_bytes(5))

    def mark(self) -> tuple[Event, ...]:
        return ()

    async def write(
        self,
        sender: Sender,
        grant_id: str,
        region: RegionKey,
        runs: Sequence[CopyRun],
        after: Sequence[Event],
    ) -> None:
        for run in runs:
            piece = bytearray()
            self._port.read([(run.source, run.num_bytes)], piece.extend)
            self.found[run.destination : run.destination + run.num_bytes] = piece

    async def close(self) -> None:
        self._port.close()


@pytest.fixture
def memory() -> Iterator[PoolMemory]:
    """With a room for two times four vectors behind the pool."""
    device = SimulatedDevice(seed=8)
    yield PoolMemory(device, device.allocate(POOL.num_bytes + 112), Poller())
    device.close()


async def test_what_is_sent_is_what_the_host_makes_of_it(memory: PoolMemory) -> None:
    values = np.random.default_rng(1).standard_normal(POOL.num_bytes // 4).astype(np.float32)
    port = HostPort(memory, "layer", POOL.num_bytes)

    def fill(slot: Slot, part: list[tuple[int, int]]) -> None:
        slot.pieces([POOL.num_bytes], write=True)[0][:] = values.tobytes()

    port.write([(0, POOL.num_bytes)], fill)
    source = Written(memory)
    num_bytes = await DeviceStaging(memory, POOL.num_bytes, source).push(Mock(), "g", REGION, RUNS, POOL, ())
    assert num_bytes == 12 * (THEIRS.vector_bytes + 4)
    data, scales = convert(OURS, values.view(np.uint8), None, THEIRS)
    assert scales is not None
    want = np.zeros(HOLDER.pool_bytes(5), np.uint8)
    vectors, there = (
        want[: HOLDER.data_bytes(5)].reshape(-1, 4),
        want[HOLDER.data_bytes(5) :].view(np.float32),
    )
    for first, to, count in RUNS.tolist():
        vectors[to : to + count] = data.reshape(-1, 4)[first : first + count]
        there[to : to + count] = scales[first : first + count]
    assert bytes(source.found) == want.tobytes()


@pytest.mark.parametrize("waits", [True, False])
async def test_a_layer_is_converted_once_it_is_computed(memory: PoolMemory, waits: bool) -> None:
    source, compute = Written(memory), memory.device.compute
    staging = DeviceStaging(memory, POOL.num_bytes, source)
    compute.uses([], [memory.region.part(0, POOL.num_bytes)])
    after = (compute.record(),) if waits else ()
    if waits:
        await staging.push(Mock(), "g", REGION, RUNS, POOL, after)
        return
    with pytest.raises(Bug, match="convert reads .* nothing orders that behind compute"):
        await staging.push(Mock(), "g", REGION, RUNS, POOL, after)
