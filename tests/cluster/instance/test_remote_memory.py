"""A memory behind its memory server is a memory like any other: what is admitted, refused, fenced and counted, and what a memory server's end means."""

import asyncio
import mmap
import os
import socket
import threading
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Any

import pytest

from cluster.instance.remote_memory.memory_messages import MemoryReady, MemorySetup
from cluster.instance.remote_memory.memory_server import serve_memory
from cluster.instance.remote_memory.remote_host import RemoteHost, start_memories
from core.config.cluster_config import MailConfig, TransferConfig
from core.errors import ConfigError, ReplicaLost, TransferError
from core.kv import RankPool
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
WAYS = ["tcp", pytest.param("nixl", marks=pytest.mark.skipif(not available(), reason="no nixl"))]


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
    exchange_blocks: int = 0,
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
        exchange_blocks=exchange_blocks,
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
