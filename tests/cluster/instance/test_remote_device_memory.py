"""A memory server of a device's memory: what it hands over, converts, saves and puts back, and nothing unordered."""

import asyncio
import os
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest

from cluster.instance.remote_memory.remote_bytes import NUM_SLOTS, RemoteBytes
from core.errors import ReplicaLost, TransferError
from core.kv import RankPool
from device.convert import convert
from device.poller import Poller
from device.port import HostPort, PoolMemory
from device.ring import Slot
from device.simulated import SimulatedDevice
from engine.tiers.block_pieces import BlockPieces
from kvtransfer.inbox import Inbox
from tests.cluster.instance.test_remote_memory import POOL, ThreadServer, started
from tests.contract.transports import BLOCKS, SHARD, commit, runs_for
from tests.patience import until


class RankOnDevice:
    """What a rank has of the memory that its memory server owns."""

    def __init__(
        self, transport: str, receives: bool, pool: RankPool = POOL, exchange_blocks: int = 0
    ) -> None:
        self.owner, self.opener = SimulatedDevice(seed=1), SimulatedDevice(seed=2)
        self.remote = started(
            ThreadServer(transport, self.owner),
            receives,
            device="cuda:0",
            pool=pool,
            exchange_blocks=exchange_blocks,
        )
        self._pool = pool
        place = self.remote.memory
        whole = self.opener.open(place.handle, place.offset + place.num_bytes)
        region = whole.part(place.offset, pool.num_bytes)
        self.port = HostPort(PoolMemory(self.opener, region, Poller()), "rank", 1 << 12)

    @property
    def content(self) -> bytes:
        found = bytearray()
        self.port.read([(0, self._pool.num_bytes)], found.extend)
        return bytes(found)

    def fill(self, content: bytes) -> None:
        self.port.write([(0, len(content))], lambda slot, part: fill_slot(slot, part, content))

    async def close(self) -> list[str]:
        """Returns what was not ordered."""
        await self.remote.close()
        self.port.close()
        self.owner.close()
        self.opener.close()
        return self.owner.violations + self.opener.violations


def fill_slot(slot: Slot, part: list[tuple[int, int]], content: bytes) -> None:
    for (start, size), piece in zip(part, slot.pieces([size for _, size in part], write=True), strict=True):
        piece[:] = content[start : start + size]


@pytest.mark.parametrize("transport", ["tcp", "cuda_ipc"])
async def test_a_memory_on_a_device_is_handed_over_from_rank_to_rank(transport: str) -> None:
    writer, holder = RankOnDevice(transport, False), RankOnDevice(transport, True)
    completed: list[Any] = []
    inbox = Inbox(
        SHARD,
        BLOCKS,
        "holder",
        "h1",
        on_complete=completed.append,
        on_corrupted=lambda _: None,
        pools=(POOL,),
        remote=(holder.remote,),
    )
    writer.remote.run(lambda *_: None, lambda *_: None)
    holder.remote.run(inbox.arrived, inbox.corrupted)
    content = os.urandom(POOL.num_bytes)
    for turn in range(2):
        writer.fill(content)
        grant = inbox.open(f"r#{turn}", 0, "writer", [3, 9], first_token=0, num_tokens=8, ttl_s=60)
        opened = asyncio.Event()
        inbox.when_open(opened.set)
        await opened.wait()
        runs = runs_for([3, 9], [7, 1])
        await writer.remote.senders[0].write(grant.id, grant.regions[0], runs)
        inbox.committed(commit(grant.id, sum(run.num_bytes for run in runs)))
        await until(lambda turn=turn: len(completed) == turn + 1)
        for layer in range(2):
            for ours, theirs in ((7, 3), (1, 9)):
                at, to = ((layer * BLOCKS + block) * SHARD.block_bytes for block in (ours, theirs))
                assert holder.content[to : to + SHARD.block_bytes] == content[at : at + SHARD.block_bytes]
        content = os.urandom(POOL.num_bytes)
    grant = inbox.open("r#2", 0, "writer", [5], first_token=0, num_tokens=4, ttl_s=60)
    before = holder.content
    await inbox.fence(grant.id, "writer")
    with suppress(ReplicaLost, TransferError):
        await writer.remote.senders[0].write(grant.id, grant.regions[0], runs_for([5], [0]))
    assert holder.content == before
    assert await writer.close() + await holder.close() == []


@pytest.mark.parametrize("transport", ["tcp", "cuda_ipc"])
async def test_vectors_are_converted_by_the_memory_server_for_a_holder_that_stores_otherwise(
    transport: str,
) -> None:
    layout = replace(SHARD.layout, dtype="int8", scales="vector")
    pool = RankPool(shard=replace(SHARD, layout=layout), num_blocks=BLOCKS, memory=1)
    writer, holder = RankOnDevice(transport, False), RankOnDevice(transport, True, pool)
    completed: list[Any] = []
    inbox = Inbox(
        pool.shard,
        BLOCKS,
        "holder",
        "h1",
        on_complete=completed.append,
        on_corrupted=lambda _: None,
        pools=(pool,),
        remote=(holder.remote,),
    )
    writer.remote.run(lambda *_: None, lambda *_: None)
    holder.remote.run(inbox.arrived, inbox.corrupted)
    values = np.random.default_rng(0).standard_normal(POOL.num_bytes // 4).astype(np.float32)
    writer.fill(values.tobytes())
    grant = inbox.open("r#0", 0, "writer", [3, 9], first_token=0, num_tokens=8, ttl_s=60)
    opened = asyncio.Event()
    inbox.when_open(opened.set)
    await opened.wait()
    each = SHARD.block_vectors
    runs = np.array([[7 * each, 3 * each, each], [1 * each, 9 * each, each]])
    sender, region = writer.remote.senders[0], grant.regions[0]
    num_bytes = await writer.remote.push(sender, grant.id, region, runs, POOL, ())
    assert num_bytes == 2 * each * (layout.vector_bytes + layout.scale_bytes)
    inbox.committed(commit(grant.id, num_bytes))
    await until(lambda: bool(completed))
    data, scales = convert(SHARD.layout, values.view(np.uint8), None, layout)
    assert scales is not None
    found, at = np.frombuffer(holder.content, np.uint8), pool.shard.data_bytes(BLOCKS)
    there = found[:at].reshape(-1, layout.vector_bytes), found[at:].view(np.float32)
    for source, to, count in runs.tolist():
        want = data.reshape(-1, layout.vector_bytes)[source : source + count]
        assert np.array_equal(there[0][to : to + count], want)
        assert np.array_equal(there[1][to : to + count], scales[source : source + count])
    assert np.count_nonzero(there[1]) == 2 * each, "nothing else is touched"
    assert await writer.close() + await holder.close() == []


async def test_blocks_are_saved_and_put_back_by_the_memory_server() -> None:
    """More of them than are on their way at once."""
    rank = RankOnDevice("tcp", False, exchange_blocks=NUM_SLOTS)
    rank.remote.run(lambda *_: None, lambda *_: None)
    assert rank.remote.exchange is not None
    exchange = RemoteBytes(rank.remote, rank.remote.exchange)
    pieces = BlockPieces(memoryview(b""), (POOL,), {1: exchange})
    content, saved = os.urandom(POOL.num_bytes), dict[int, bytes]()
    rank.fill(content)
    for block in range(BLOCKS):
        pieces.save(block, partial(saved.__setitem__, block))
    await exchange.settled()
    assert len(saved) == BLOCKS > NUM_SLOTS
    rank.fill(bytes(POOL.num_bytes))
    for block, each in saved.items():
        await asyncio.to_thread(pieces.scatter, block, memoryview(each))
    assert rank.content == content
    await asyncio.to_thread(pieces.close)
    assert await rank.close() == []
