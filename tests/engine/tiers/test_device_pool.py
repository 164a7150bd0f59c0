"""Lower tiers of a pool on a device: nobody waits for a block that is saved, and what is saved is what it held."""

import asyncio
import os
from pathlib import Path

import numpy as np
import pytest

from core.config.cluster_config import EngineConfig
from core.errors import DeviceError
from core.kv import KVLayout, KVShard, RankPool
from device.poller import Poller
from device.port import PoolMemory
from device.simulated import SimulatedDevice
from engine.tiers.build_tiers import build_tiers
from engine.tiers.pool_bytes import bytes_of_pool
from engine.tiers.tier_store import TierStore
from tests.patience import PATIENCE_S

SHARD = KVShard.whole(
    KVLayout(num_layers=3, num_kv_heads=2, head_dim=8, block_size=4, dtype="int8", scales="vector")
)
NUM_BLOCKS = 24


def computed(memory: PoolMemory, content: bytes) -> None:
    """A step writes the whole pool."""
    compute, region = memory.device.compute, memory.region
    memory.order(compute)
    compute.uses([], [region])
    np.asarray(memory.device.array(region))[:] = np.frombuffer(content, np.uint8)


async def test_blocks_are_saved_while_steps_go_on_and_come_back_layer_by_layer(tmp_path: Path) -> None:
    device = SimulatedDevice(seed=9)
    size = SHARD.pool_bytes(NUM_BLOCKS)
    memory = PoolMemory(device, device.allocate(size), Poller())
    config = EngineConfig(
        block_size=4,
        host_cache_bytes=8 * SHARD.pool_bytes(1),
        disk_cache_bytes=1 << 20,
        disk_cache_path=str(tmp_path),
    )
    store = build_tiers(config, memory, [RankPool(shard=SHARD, num_blocks=NUM_BLOCKS)], "r")
    assert store is not None
    before = os.urandom(size)
    computed(memory, before)
    await memory.poller.done([device.compute.record()])
    digests = [bytes([block]) * 16 for block in range(NUM_BLOCKS)]
    heard: dict[bytes, bytes] = {}
    store.on_saved = heard.__setitem__
    for block, digest in enumerate(digests):
        store.save(digest, block, b"")
    computed(memory, bytes(size))
    contents = await _all_of(store, digests, heard)
    await memory.poller.done([device.compute.record()])
    await store.fill(range(NUM_BLOCKS), contents)
    assert np.asarray(device.array(memory.region)).tobytes() == before
    await store.close()
    device.close()
    assert not device.violations


async def _all_of(store: TierStore, digests: list[bytes], heard: dict[bytes, bytes]) -> list[bytes]:
    async with asyncio.timeout(PATIENCE_S):
        while len(heard) < len(digests):
            await asyncio.sleep(0.001)
    contents = await store.fetch(digests)
    assert contents == [heard[digest] for digest in digests]
    return contents


async def test_a_save_that_the_device_refuses_keeps_none_of_the_memory_that_saves_go_through() -> None:
    device = SimulatedDevice(seed=9)
    memory = PoolMemory(device, device.allocate(256), Poller())
    pool, saved = bytes_of_pool(memory, 64), asyncio.Event()
    for _ in range(16):
        with pytest.raises(DeviceError, match="outside a region"):
            pool.save([(256, 64)], lambda _: None)
    pool.save([(0, 64)], lambda _: saved.set())
    await asyncio.wait_for(saved.wait(), PATIENCE_S)
    await asyncio.to_thread(pool.close)
    device.close()
    assert not device.violations
