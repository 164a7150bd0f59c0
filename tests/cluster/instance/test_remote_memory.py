"""A memory behind its memory server is a memory like any other: what is admitted, refused, fenced and counted, and what a memory server's end means."""

import asyncio
import mmap
import os
import socket
import threading
from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from cluster.instance.remote_memory.memory_messages import MemoryReady, MemorySetup
from cluster.instance.remote_memory.memory_server import serve_memory
from cluster.instance.remote_memory.remote_host import RemoteHost, start_memories
from core.config import MailConfig, TransferConfig
from core.errors import ConfigError, ReplicaLost, TransferError
from core.kv import RankPool
from device.convert import convert
from device.poller import Poller
from device.port import HostPort, PoolMemory
from device.ring import Slot
from device.simulated import SimulatedDevice
from engine.ranks.rank_messages import MemoryPlace, frame
from kvtransfer.inbox import Inbox
from kvtransfer.transport.nixl import available
from tests.contract.transports import (
    BLOCKS,
    KEY,
    SHARD,
    Holder,
    commit,
    make_sender,
    runs_for,
    source_for,
    write_or_refused,
)
from tests.patience import PATIENCE_S, until

POOL = RankPool(shard=SHARD, num_blocks=BLOCKS, memory=1)
WAYS = ["tcp", "gloo", pytest.param("nixl", marks=pytest.mark.skipif(not available(), reason="no nixl"))]


class ThreadServer:
    """engine.ranks.rank.Rank: a memory server on a thread, with a loop of its own; or nobody, who never answers."""

    name = "the memory server of host 1"

    def __init__(self, transport: str = "", device: SimulatedDevice | None = None) -> None:
        """`device`: whose memory it serves; none: the host's."""
        self.sock, self.theirs = socket.socketpair()
        self.ended = False
        self._thread: threading.Thread | None = None
        if transport:
            config = TransferConfig.model_validate({"transport": transport, "tcp_streams": 1})
            arguments = self.theirs, config, KEY, lambda _: device
            self._thread = threading.Thread(target=serve_memory, args=arguments)
            self._thread.start()

    def obituary(self) -> str:
        return f"{self.name} has ended"

    def end(self, patience_s: float = 0.0) -> None:
        self.ended = True
        self.sock.close()
        if self._thread is not None:
            self._thread.join(PATIENCE_S)
        self.theirs.close()


def started(
    memory_server: ThreadServer,
    receives: bool,
    silence_s: float = 30.0,
    device: str = "",
    pool: RankPool = POOL,
) -> RemoteHost:
    address = "holder" if receives else "writer"
    setup = MemorySetup(
        memory=1,
        address=address,
        incarnation="i",
        receives=receives,
        host="127.0.0.1",
        pools=(pool,),
        device=device,
    )
    (remote,) = start_memories(
        lambda *_: [memory_server], [setup], MailConfig(heartbeat_s=0.1, peer_timeout_s=silence_s)
    )
    return remote


def mapped(remote: RemoteHost) -> mmap.mmap:
    descriptor = os.open(remote.memory.path, os.O_RDWR)
    try:
        return mmap.mmap(descriptor, remote.memory.num_bytes)
    finally:
        os.close(descriptor)


class Side:
    """A holder whose one pool lies in the memory of another host."""

    def __init__(self, kind: str) -> None:
        self.completed: list[Any] = []
        self.memory_server = ThreadServer(kind)
        self.remote = started(self.memory_server, True)
        self.buffer = mapped(self.remote)
        self.inbox = Inbox(
            SHARD,
            BLOCKS,
            "holder",
            "h1",
            on_complete=self.completed.append,
            on_corrupted=lambda _: None,
            pools=(POOL,),
            remote=(self.remote,),
        )
        self.remote.run(self.inbox.arrived, self.inbox.corrupted)

    async def grant(self, blocks: list[int]) -> Any:
        grant = self.inbox.open(
            "r#0", 0, "writer", blocks, first_token=0, num_tokens=4 * len(blocks), ttl_s=60
        )
        await self.settled()
        return grant

    async def settled(self) -> None:
        """What has been said has taken effect."""
        over = asyncio.Event()
        self.inbox.when_open(over.set)
        assert not over.is_set(), "the word is on its way"
        await over.wait()


@pytest.fixture(params=WAYS)
async def side(request: pytest.FixtureRequest) -> AsyncIterator[tuple[str, Side]]:
    made = Side(request.param)
    yield request.param, made
    await made.inbox.shut()
    assert made.memory_server.ended


async def test_writes_are_admitted_counted_and_refused_as_the_instance_says(side: tuple[str, Side]) -> None:
    kind, holder = side
    source = source_for(kind, os.urandom(SHARD.pool_bytes(BLOCKS)))
    sender = make_sender(kind, None, source)  # type: ignore[arg-type]
    grant = await holder.grant([3, 9])
    (region,) = grant.regions
    assert (region.transport, region.rank) == (kind, 0)
    runs = runs_for([3, 9], [7, 1])
    await sender.write(grant.id, region, runs)
    await write_or_refused(sender, grant.id, region, runs_for([5], [0]))
    await write_or_refused(sender, "nobody's", region, runs_for([3], [0]))
    holder.inbox.committed(commit(grant.id, sum(run.num_bytes for run in runs)))
    await until(lambda: bool(holder.completed))
    await holder.settled()
    await write_or_refused(sender, grant.id, region, runs_for([3], [0]))
    for layer in range(2):
        for block in range(BLOCKS):
            at = (layer * BLOCKS + {3: 7, 9: 1}.get(block, 0)) * SHARD.block_bytes
            want = source[at : at + SHARD.block_bytes] if block in (3, 9) else bytes(SHARD.block_bytes)
            at = (layer * BLOCKS + block) * SHARD.block_bytes
            assert holder.buffer[at : at + SHARD.block_bytes] == bytes(want)
    await sender.close()


async def test_a_fence_reaches_the_memory_and_so_does_a_writers_last_word(side: tuple[str, Side]) -> None:
    kind, holder = side
    source = source_for(kind, b"x" * SHARD.pool_bytes(BLOCKS))
    sender = make_sender(kind, None, source)  # type: ignore[arg-type]
    grant = await holder.grant([2])
    await sender.write(grant.id, grant.regions[0], runs_for([2], [0])[:1])
    await holder.inbox.fence(grant.id, "writer")
    assert not holder.inbox.num_live
    before = bytes(holder.buffer)
    for _ in range(5):
        with suppress(ReplicaLost, TransferError):
            await sender.write(grant.id, grant.regions[0], runs_for([2], [1]))
        await asyncio.sleep(0.01)
    assert bytes(holder.buffer) == before
    grant, ended = await holder.grant([4]), asyncio.Event()
    holder.inbox.end(grant.id, ended.set)
    await ended.wait()
    assert not holder.inbox.num_live
    await sender.close()


async def test_a_memory_servers_senders_write_from_its_memory_and_say_what_went_wrong() -> None:
    holder = Holder("tcp")
    memory_server = ThreadServer("tcp")
    remote = started(memory_server, False)
    remote.run(lambda *_: None, lambda *_: None)
    source = mapped(remote)
    source[:] = os.urandom(len(source))
    (sender,) = remote.senders
    grant = holder.grant([3, 9])
    (region,) = grant.regions
    assert sender.reaches(region)
    assert await sender.probe(region, 1000) == 1000
    runs = runs_for([3, 9], [7, 1])
    await sender.write(grant.id, region, runs)
    holder.inbox.committed(commit(grant.id, sum(run.num_bytes for run in runs)))
    await until(lambda: bool(holder.completed))
    assert holder.block(1, 9) == source[(BLOCKS + 1) * SHARD.block_bytes :][: SHARD.block_bytes]
    sender.ended(grant.id)
    await holder.inbox.fence(holder.grant([5]).id, "writer")
    sender.forget("holder")
    await holder.inbox.shut()
    with pytest.raises(ReplicaLost):
        await sender.write(grant.id, region, runs)
    await remote.close()


class RankOnDevice:
    """What a rank has of the memory that its memory server owns."""

    def __init__(self, transport: str, receives: bool, pool: RankPool = POOL) -> None:
        self.owner, self.opener = SimulatedDevice(seed=1), SimulatedDevice(seed=2)
        self.remote = started(ThreadServer(transport, self.owner), receives, device="cuda:0", pool=pool)
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


async def test_who_does_not_answer_is_lost_and_nothing_of_it_is_left_to_fence() -> None:
    memory_server = ThreadServer()
    memory_server.theirs.sendall(
        frame(MemoryReady(memory=MemoryPlace(0), host="elsewhere", regions=((),), ways=()))
    )
    remote = started(memory_server, True, 2.0)
    opened: list[str] = []
    inbox = Inbox(
        SHARD,
        BLOCKS,
        "holder",
        "h1",
        on_complete=lambda _: None,
        on_corrupted=lambda _: None,
        remote=(remote,),
    )
    remote.run(inbox.arrived, inbox.corrupted)
    grant = inbox.open("r#0", 0, "writer", [1], first_token=0, num_tokens=4, ttl_s=60)
    inbox.when_open(lambda: opened.append(grant.id))
    fencing = asyncio.create_task(inbox.fence(grant.id, "writer"))
    await asyncio.sleep(0.02)
    assert inbox.num_live == 1, "it may still be written to there"
    assert not fencing.done()
    error = await asyncio.wait_for(remote.lost(), PATIENCE_S)
    assert "has not answered for 2 s" in str(error)
    assert memory_server.ended
    await asyncio.wait_for(fencing, PATIENCE_S)
    assert not inbox.num_live
    with pytest.raises(ReplicaLost):
        await remote.ask(None)
    assert opened == [], "nobody was told that writes are admitted"
    await remote.close()


async def test_a_memory_server_that_cannot_do_it_says_why_and_one_that_ends_is_an_error() -> None:
    with pytest.raises(ConfigError, match="host 1 did not start: ConfigError: .* loopback"):
        started(ThreadServer("loopback"), True)
    memory_server = ThreadServer()
    memory_server.theirs.close()
    with pytest.raises(ReplicaLost, match="has ended"):
        started(memory_server, True)
