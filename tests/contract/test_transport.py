"""One suite over every KV transport; the writers of shared memory and TCP are processes of their own."""

import asyncio
import contextlib
import multiprocessing
import os
import random
import signal
import struct
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import msgpack
import numpy as np
import pytest
import torch

from core.errors import ReplicaLost, TransferError
from core.kv import KVLayout, KVShard
from core.messages import Commit, Grant, RegionKey
from core.types import TokenOut
from kvtransfer.copies import CopyRun, Side, as_bytes, at_layer, plan_vectors
from kvtransfer.inbox import Inbox
from kvtransfer.transport.admission import Admission
from kvtransfer.transport.base import Receiver, Sender
from kvtransfer.transport.collective import CollectiveMedium
from kvtransfer.transport.cuda_ipc import CudaIpcMedium
from kvtransfer.transport.loopback import LoopbackFabric, LoopbackReceiver, LoopbackSender
from kvtransfer.transport.nixl import Memory, NixlMedium, available
from kvtransfer.transport.pull import Medium, PullReceiver, PullSender, _Incoming
from kvtransfer.transport.shm import SharedSegment, ShmReceiver, ShmSender, remove_orphans
from kvtransfer.transport.tcp import TcpReceiver, TcpSender
from net.channel import Channel, Identity, connect
from tests.contract.fake_cuda import FakeDriver

KEY = b"cluster key"
SHARD = KVShard.whole(KVLayout(2, 2, 4, 4, "float32"))
BLOCKS = 16
WRITER = Identity("writer", "w1", os.getpid())
needs_nixl = pytest.mark.skipif(not available(), reason="the nixl extra is not installed")


@dataclass
class Holder:
    """The decode side: a pool, an inbox and one receiver."""

    kind: str
    fabric: LoopbackFabric = field(default_factory=LoopbackFabric)
    completed: list[Commit] = field(default_factory=list)
    corrupted: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        size = SHARD.pool_bytes(BLOCKS)
        self.segment = SharedSegment(size) if self.kind == "shm" else None
        self.buffer = self.segment.buffer if self.segment else pool_for(self.kind, size)
        self.inbox = Inbox(SHARD, BLOCKS, "holder", "h1", self.completed.append, self.corrupted.append)
        self.receiver: Any
        if self.segment:
            self.receiver = ShmReceiver(self.segment)
        elif self.kind == "loopback":
            self.receiver = LoopbackReceiver(
                self.fabric, "holder", self.buffer, self.inbox.may_write, self.inbox.arrived
            )
        else:
            me = Identity("holder", "h1", os.getpid())
            self.receiver = make_receiver(self.kind, me, self.buffer, self.admission())
        receivers: list[Receiver] = [self.receiver]
        self.inbox.attach(receivers)

    def admission(self) -> Admission:
        self.admitted = Admission(self.inbox.may_write, self.inbox.arrived, self.inbox.corrupted)
        return self.admitted

    @property
    def num_refused(self) -> int:
        if self.kind == "shm":
            return 0  # it cannot refuse
        return self.receiver.num_refused if self.kind == "loopback" else self.admitted.num_refused

    def grant(self, blocks: list[int], key: str = "r#0", epoch: int = 0, num_tokens: int | None = None):
        return self.inbox.open(key, epoch, "writer", blocks, 0, num_tokens or 4 * len(blocks), 60)

    def block(self, layer: int, block: int) -> bytes:
        start = (layer * BLOCKS + block) * SHARD.block_bytes
        return bytes(self.buffer[start : start + SHARD.block_bytes])


DRIVERS: dict[int, FakeDriver] = {}
"""Of fake device memory, by its address."""


def pool_for(kind: str, num_bytes: int) -> memoryview:
    if kind != "cuda_ipc":
        return memoryview(bytearray(num_bytes))
    driver = FakeDriver()
    address = driver.allocate(num_bytes + 64)
    DRIVERS[address + 64] = driver
    return driver.view(address)[64:]


def medium(kind: str, pool: memoryview) -> Medium:
    match kind:
        case "cuda_ipc":
            address = np.frombuffer(pool, np.uint8).ctypes.data
            return CudaIpcMedium(DRIVERS[address], address, len(pool))
        case "nixl":
            return NixlMedium(Memory.of(pool))
        case "gloo":
            return CollectiveMedium("gloo", torch.frombuffer(pool, dtype=torch.uint8), "127.0.0.1")
        case _:
            raise AssertionError(kind)


def source_for(kind: str, content: bytes) -> memoryview:
    source = pool_for(kind, len(content))
    source[:] = content
    return source


def make_receiver(kind: str, me: Identity, pool: memoryview, admission: Admission) -> Receiver:
    if kind == "tcp":
        return TcpReceiver(KEY, me, "127.0.0.1", pool, admission)
    return PullReceiver(KEY, me, "127.0.0.1", medium(kind, pool), admission)


def make_sender(
    kind: str, fabric: LoopbackFabric, source: memoryview, checksum: bool = False, me: Identity = WRITER
) -> Sender:
    match kind:
        case "loopback":
            return LoopbackSender(fabric, source)
        case "shm":
            return ShmSender(source, checksum)
        case "tcp":
            return TcpSender(KEY, me, source, checksum)
        case _:
            return PullSender(KEY, me, medium(kind, source), checksum)


PULLED = [pytest.param("nixl", marks=needs_nixl), "gloo", "cuda_ipc"]
IN_HOST_MEMORY = PULLED[:2]
REMOTE = ["tcp", *PULLED]


@pytest.fixture(params=["loopback", "shm", *REMOTE])
async def holder(request: pytest.FixtureRequest) -> AsyncIterator[Holder]:
    made = Holder(request.param)
    yield made
    await made.inbox.shut()


@pytest.fixture(autouse=True)
def fake_memory() -> Iterator[None]:
    yield
    for driver in DRIVERS.values():
        driver.free_all()
    DRIVERS.clear()


def runs_for(blocks: list[int], source_blocks: list[int]) -> list[CopyRun]:
    a, b = Side(SHARD, BLOCKS, source_blocks), Side(SHARD, BLOCKS, blocks)
    planned = plan_vectors(a, b, 0, 4 * len(blocks))
    return [run for layer in range(2) for run in as_bytes(at_layer(planned, a, b, layer), a, b)]


async def write_or_refused(sender: Sender, grant_id: str, region: RegionKey, runs: list[CopyRun]) -> None:
    """Whether the writer hears of a refusal is the transport's business."""
    with contextlib.suppress(TransferError):
        await sender.write(grant_id, region, runs)


async def until(done: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not done():
            await asyncio.sleep(0.002)


def commit(grant_id: str, num_bytes: int) -> Commit:
    return Commit(grant_id, 1, num_bytes, TokenOut("r", 0, 0, 5))


async def test_bytes_land_in_the_granted_blocks_and_nowhere_else(holder: Holder) -> None:
    source = source_for(holder.kind, os.urandom(SHARD.pool_bytes(BLOCKS)))
    sender = make_sender(holder.kind, holder.fabric, source)
    grant = holder.grant([3, 9, 4])
    runs = runs_for([3, 9, 4], [7, 1, 2])
    (region,) = grant.regions
    assert sender.reaches(region)
    await sender.write(grant.id, region, runs)
    total = sum(run.num_bytes for run in runs)
    if sender.vouches:
        holder.inbox.arrived(grant.id, total)
    holder.inbox.committed(commit(grant.id, total))
    await until(lambda: bool(holder.completed))
    for layer in range(2):
        for block in range(BLOCKS):
            start = (layer * BLOCKS + {3: 7, 9: 1, 4: 2}.get(block, 0)) * SHARD.block_bytes
            expected = (
                bytes(source[start : start + SHARD.block_bytes])
                if block in (3, 9, 4)
                else bytes(SHARD.block_bytes)
            )
            assert holder.block(layer, block) == expected
    await sender.close()


async def test_commit_before_the_last_bytes_waits_for_them(holder: Holder) -> None:
    grant = holder.grant([1])
    holder.inbox.committed(commit(grant.id, 100))
    holder.inbox.arrived(grant.id, 60)
    assert not holder.completed
    holder.inbox.arrived(grant.id, 40)
    assert len(holder.completed) == 1
    holder.inbox.arrived(grant.id, 100)
    holder.inbox.check_integrity()
    assert len(holder.completed) == 1


# Shared memory cannot refuse a write: its fence is the writer's death, below.
@pytest.mark.parametrize("holder", ["loopback", *REMOTE], indirect=True)
async def test_writes_without_a_live_grant_are_refused(holder: Holder) -> None:
    source = source_for(holder.kind, b"x" * SHARD.pool_bytes(BLOCKS))
    sender = make_sender(holder.kind, holder.fabric, source)
    grant = holder.grant([2])
    for grant_id, runs in (
        ("nobody's", runs_for([2], [0])),
        (grant.id, runs_for([5], [0])),
        (grant.id, [CopyRun(0, SHARD.pool_bytes(BLOCKS) - 4, 8)]),
    ):
        before = holder.num_refused
        await write_or_refused(sender, grant_id, grant.regions[0], runs)
        await until(lambda before=before: holder.num_refused > before)
    ended: list[str] = []
    holder.inbox.end(grant.id, lambda: ended.append(grant.id))
    await until(lambda: bool(ended))
    await write_or_refused(sender, grant.id, grant.regions[0], runs_for([2], [0]))
    await until(lambda: holder.num_refused >= 4)
    assert bytes(holder.buffer) == bytes(SHARD.pool_bytes(BLOCKS))
    await sender.close()


async def test_a_holder_that_is_gone_is_an_error_for_the_writer(holder: Holder) -> None:
    source = source_for(holder.kind, bytes(SHARD.pool_bytes(BLOCKS)))
    sender = make_sender(holder.kind, holder.fabric, source)
    grant = holder.grant([2])
    await holder.inbox.shut()
    error: Exception | None = None
    for _ in range(50):
        try:
            await sender.write(grant.id, grant.regions[0], runs_for([2], [0]))
        except (ReplicaLost, TransferError) as caught:
            error = caught
            break
        await asyncio.sleep(0.01)
    assert error is not None
    await sender.close()


class Damaging:
    """A relay between writer and holder that flips a bit of the first `num_times` payloads that carry `mark`."""

    def __init__(self, target: str, mark: bytes, num_times: int) -> None:
        self._target, self._mark, self.num_left = target, mark, num_times

    async def __aenter__(self) -> str:
        self._server = await asyncio.start_server(self._relay, "127.0.0.1", 0)
        return f"127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        await self._server.wait_closed()

    async def _relay(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        host, port = self._target.split(":")
        far_reader, far_writer = await asyncio.open_connection(host, int(port))
        await asyncio.gather(self._pump(reader, far_writer), self._pump(far_reader, writer))

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(1 << 20):
            at = data.find(self._mark)
            if at >= 0 and self.num_left:
                self.num_left -= 1
                data = data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]
            writer.write(data)
        writer.close()


@pytest.mark.parametrize("num_times", [0, 1, 2])
async def test_a_chunk_that_arrives_damaged_is_sent_once_more_and_then_given_up(num_times: int) -> None:
    holder = Holder("tcp")
    mark = b"\xc7" * 16
    source = bytearray(mark * (SHARD.pool_bytes(BLOCKS) // 16))
    sender = TcpSender(KEY, WRITER, memoryview(source), checksum=True)
    grant = holder.grant([2])
    run = runs_for([2], [0])[0]
    async with Damaging(grant.regions[0].endpoint, mark, num_times) as address:
        region = replace(grant.regions[0], endpoint=address)
        if num_times < 2:
            await sender.write(grant.id, region, [run])
            assert holder.block(0, 2) == bytes(source[: SHARD.block_bytes])
            holder.inbox.committed(commit(grant.id, run.num_bytes))
            await until(lambda: bool(holder.completed))
            assert not holder.corrupted
        else:
            with pytest.raises(TransferError, match="corrupted twice"):
                await sender.write(grant.id, region, [run])
            await until(lambda: holder.corrupted == [grant.id])
            assert not holder.completed
        await sender.close()
    await holder.inbox.shut()


@pytest.mark.parametrize("num_times", [0, 1, 2])
async def test_a_damaged_copy_into_shared_memory_is_made_again_and_then_given_up(
    num_times: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    holder = Holder("shm")
    source = memoryview(bytearray(os.urandom(SHARD.pool_bytes(BLOCKS))))
    sender = ShmSender(source, checksum=True)
    copy, left = ShmSender._copy, [num_times]

    def damage(self: ShmSender, target: Any, runs: list[CopyRun]) -> None:
        copy(self, target, runs)
        if left[0]:
            left[0] -= 1
            target.view[runs[0].destination] ^= 1

    monkeypatch.setattr(ShmSender, "_copy", damage)
    grant = holder.grant([2])
    if num_times < 2:
        await sender.write(grant.id, grant.regions[0], runs_for([2], [0]))
        assert holder.block(0, 2) == bytes(source[: SHARD.block_bytes])
    else:
        with pytest.raises(TransferError, match="corrupted twice"):
            await sender.write(grant.id, grant.regions[0], runs_for([2], [0]))
    await sender.close()
    await holder.inbox.shut()


async def test_a_probe_reaches_the_holder_and_changes_nothing(holder: Holder) -> None:
    source = source_for(holder.kind, b"x" * SHARD.pool_bytes(BLOCKS))
    sender = make_sender(holder.kind, holder.fabric, source)
    (region,) = holder.inbox.regions()
    await sender.probe(region, 1 << 20)
    assert bytes(holder.buffer) == bytes(SHARD.pool_bytes(BLOCKS))
    assert not holder.num_refused
    await sender.close()


async def test_concurrent_writes_to_one_holder_keep_their_frames_apart(holder: Holder) -> None:
    source = source_for(holder.kind, os.urandom(SHARD.pool_bytes(BLOCKS)))
    sender = make_sender(holder.kind, holder.fabric, source)
    grants = [holder.grant([block], key=f"r{block}#0") for block in range(8)]
    await asyncio.gather(
        *(sender.write(g.id, g.regions[0], runs_for(list(g.block_ids), list(g.block_ids))) for g in grants)
    )
    await until(
        lambda: all(
            holder.block(layer, block)
            == bytes(source[(at := (layer * BLOCKS + block) * SHARD.block_bytes) : at + SHARD.block_bytes])
            for layer in range(2)
            for block in range(8)
        )
    )
    await sender.close()


async def test_many_streams_and_many_runs_arrive_whole() -> None:
    """More runs than one system call takes, more bytes than one stream gets, in no order."""
    size, num = 1024, 6000
    pool = memoryview(bytearray(size * num))
    got: list[int] = []
    me = Identity("holder", "h1", os.getpid())
    receiver = TcpReceiver(
        KEY, me, "127.0.0.1", pool, Admission(lambda *_: True, lambda _, n: got.append(n), lambda _: None)
    )
    source = memoryview(bytearray(os.urandom(size * num)))
    order = random.Random(1).sample(range(num), num)
    runs = [CopyRun(i * size, at * size, size) for i, at in enumerate(order)]
    sender = TcpSender(KEY, WRITER, source, checksum=False, num_streams=3)
    await sender.write("g", receiver.region(SHARD, BLOCKS), runs)
    await until(lambda: sum(got) == size * num)
    assert all(
        pool[at * size : (at + 1) * size] == source[i * size : (i + 1) * size] for i, at in enumerate(order)
    )
    await sender.close()
    await receiver.close()


def _write_forever(kind: str, region: RegionKey, grant_id: str, started: Any) -> None:
    async def main() -> None:
        source = source_for(kind, b"\xab" * SHARD.pool_bytes(BLOCKS))
        sender = make_sender(kind, LoopbackFabric(), source, me=Identity("writer", "w", os.getpid()))
        while True:
            await sender.write(grant_id, region, runs_for([2], [0]))
            started.set()
            await asyncio.sleep(0.001)

    asyncio.run(main())


@pytest.mark.parametrize("kind", ["shm", *REMOTE])
async def test_after_the_fence_of_a_writer_process_nothing_changes_any_more(kind: str) -> None:
    holder = Holder(kind)
    grant = holder.grant([2])
    context = multiprocessing.get_context("spawn")
    started = context.Event()
    writer = context.Process(
        target=_write_forever, args=(kind, grant.regions[0], grant.id, started), daemon=True
    )
    writer.start()
    try:
        await asyncio.to_thread(started.wait, 30)
        await until(lambda: holder.block(1, 2) == b"\xab" * SHARD.block_bytes)
        fence = asyncio.create_task(holder.inbox.fence(grant.id, "writer"))
        await asyncio.sleep(0.05)
        assert fence.done() == (kind != "shm"), "a living process with a mapping is not fenced"
        os.kill(writer.pid or 0, signal.SIGKILL)
        await asyncio.wait_for(fence, 5)
        assert holder.inbox.num_live == 0
        holder.buffer[:] = bytes(len(holder.buffer))
        await asyncio.sleep(0.05)
        assert bytes(holder.buffer) == bytes(len(holder.buffer))
    finally:
        writer.kill()
        await asyncio.to_thread(writer.join)
        await holder.inbox.shut()


@pytest.mark.parametrize("kind", REMOTE)
async def test_a_stopped_writer_is_fenced_in_time_and_changes_nothing_when_it_goes_on(kind: str) -> None:
    holder = Holder(kind)
    grant = holder.grant([2])
    context = multiprocessing.get_context("spawn")
    started = context.Event()
    writer = context.Process(
        target=_write_forever, args=(kind, grant.regions[0], grant.id, started), daemon=True
    )
    writer.start()
    try:
        await asyncio.to_thread(started.wait, 30)
        os.kill(writer.pid or 0, signal.SIGSTOP)
        async with asyncio.timeout(5):
            await holder.inbox.fence(grant.id, "writer")
        assert holder.inbox.num_live == 0
        holder.buffer[:] = bytes(len(holder.buffer))
        os.kill(writer.pid or 0, signal.SIGCONT)
        await asyncio.sleep(0.1)
        assert bytes(holder.buffer) == bytes(len(holder.buffer))
    finally:
        writer.kill()
        await asyncio.to_thread(writer.join)
        await holder.inbox.shut()


async def connected(holder: Holder) -> tuple[Sender, Grant, Any]:
    """A sender that has written once, its grant, and the holder's end of its medium."""
    source = source_for(holder.kind, b"\xab" * SHARD.pool_bytes(BLOCKS))
    sender = make_sender(holder.kind, holder.fabric, source)
    grant = holder.grant([2, 3])
    await sender.write(grant.id, grant.regions[0], runs_for([2], [0]))
    ((link,),) = holder.receiver._links.values()
    return sender, grant, link._intake


@pytest.mark.parametrize("holder", PULLED, indirect=True)
async def test_an_intake_that_was_aborted_fetches_nothing_more(holder: Holder) -> None:
    sender, _, intake = await connected(holder)
    await asyncio.to_thread(intake.abort)
    holder.buffer[:] = bytes(len(holder.buffer))
    with pytest.raises(TransferError, match="cut off"):
        await asyncio.to_thread(lambda: intake.fetch(runs_for([2], [0]), scratch=False))
    assert bytes(holder.buffer) == bytes(len(holder.buffer))
    await sender.close()


@pytest.mark.parametrize("holder", PULLED, indirect=True)
async def test_the_fence_waits_for_a_fetch_that_is_writing_the_pool(
    holder: Holder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever moves the bytes is held half-way: the blocks may not be given away before it is over."""
    sender, grant, intake = await connected(holder)
    begun, go_on = threading.Event(), threading.Event()

    def held(call: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            begun.set()
            assert go_on.wait(10)
            return call(*args)

        return run

    match holder.kind:
        case "nixl":
            monkeypatch.setattr(intake, "_finish", held(intake._finish))
        case "cuda_ipc":
            monkeypatch.setattr(intake._medium.driver, "copy", held(intake._medium.driver.copy))
        case _:
            empty = intake._empty

            def emptying(number: int, chunk: list[CopyRun]) -> None:
                with intake._lock:
                    begun.set()
                    assert go_on.wait(10)
                empty(number, chunk)

            monkeypatch.setattr(intake, "_empty", emptying)
    writing = asyncio.create_task(sender.write(grant.id, grant.regions[0], runs_for([3], [0])))
    assert await asyncio.to_thread(begun.wait, 10)
    fence = asyncio.create_task(holder.inbox.fence(grant.id, "writer"))
    await asyncio.sleep(0.05)
    assert not fence.done(), "the fetch could still change blocks that belong to somebody else by now"
    go_on.set()
    async with asyncio.timeout(5):
        await fence
    holder.buffer[:] = bytes(len(holder.buffer))
    with contextlib.suppress(ReplicaLost, TransferError):
        await writing
    assert bytes(holder.buffer) == bytes(len(holder.buffer))
    await sender.close()


@pytest.mark.parametrize("kind", IN_HOST_MEMORY)
@pytest.mark.parametrize("num_times", [1, 2])
async def test_a_damaged_fetch_is_made_again_and_then_given_up(
    kind: str, num_times: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    holder = Holder(kind)
    source = memoryview(bytearray(os.urandom(SHARD.pool_bytes(BLOCKS))))
    sender = make_sender(kind, holder.fabric, source, checksum=True)
    fetch, left = _Incoming._fetch, [num_times]

    def damage(self: Any, intake: Any, runs: list[CopyRun], scratch: bool, crc: int | None) -> bool:
        class Damaging:
            def fetch(self, runs: list[CopyRun], *, scratch: bool) -> None:
                intake.fetch(runs, scratch=scratch)
                if left[0]:
                    left[0] -= 1
                    holder.buffer[runs[0].destination] ^= 1

        return fetch(self, Damaging(), runs, scratch, crc)

    monkeypatch.setattr(_Incoming, "_fetch", damage)
    grant = holder.grant([2])
    if num_times == 1:
        await sender.write(grant.id, grant.regions[0], runs_for([2], [0]))
        assert holder.block(0, 2) == bytes(source[: SHARD.block_bytes])
        assert not holder.corrupted
    else:
        with pytest.raises(TransferError, match="corrupted twice"):
            await sender.write(grant.id, grant.regions[0], runs_for([2], [0]))
        await until(lambda: holder.corrupted == [grant.id])
    await sender.close()
    await holder.inbox.shut()


async def test_a_fenced_grant_that_nobody_wrote_cannot_be_written_any_more(holder: Holder) -> None:
    source = source_for(holder.kind, b"x" * SHARD.pool_bytes(BLOCKS))
    sender = make_sender(holder.kind, holder.fabric, source)
    grant = holder.grant([2])
    async with asyncio.timeout(5):
        await holder.inbox.fence(grant.id, "writer")
    with contextlib.suppress(TransferError, ReplicaLost):
        await sender.write(grant.id, grant.regions[0], runs_for([2], [0]))
    if holder.kind != "shm":
        await until(lambda: holder.num_refused > 0)
    assert bytes(holder.buffer) == bytes(SHARD.pool_bytes(BLOCKS))
    other = holder.grant([2], epoch=1)  # the same writer under another grant
    await sender.write(other.id, other.regions[0], runs_for([2], [0]))
    await until(lambda: holder.block(0, 2) == b"x" * SHARD.block_bytes)
    await sender.close()


async def half_a_frame(holder: Holder, grant_id: str) -> Channel:
    """A writer whose first run has arrived and whose second has not."""
    (region,) = holder.inbox.regions()
    channel = await connect(region.endpoint, KEY, WRITER)
    size = SHARD.block_bytes
    head = msgpack.packb([grant_id, [2 * size, 3 * size], [size, size], None, 0])
    loop = asyncio.get_running_loop()
    await loop.sock_sendall(channel._sock, struct.pack("<IQ", len(head), 2 * size) + head + b"\xab" * size)
    await until(lambda: holder.block(0, 2) == b"\xab" * size)
    return channel


async def test_a_last_word_that_overtakes_a_tcp_frame_waits_for_it() -> None:
    holder = Holder("tcp")
    grant = holder.grant([2, 3])
    channel = await half_a_frame(holder, grant.id)
    ended: list[str] = []
    holder.inbox.end(grant.id, lambda: ended.append("grant"))
    await asyncio.sleep(0.02)
    assert not ended, "the rest of the frame would be written into blocks that were given away"
    assert holder.inbox.num_live == 1
    await asyncio.get_running_loop().sock_sendall(channel._sock, b"\xab" * SHARD.block_bytes)
    await until(lambda: bool(ended))
    assert holder.inbox.num_live == 0
    channel.close()
    await holder.inbox.shut()


async def test_a_writer_that_dies_within_a_frame_does_not_keep_its_blocks() -> None:
    holder = Holder("tcp")
    grant = holder.grant([2, 3])
    channel = await half_a_frame(holder, grant.id)
    ended: list[str] = []
    holder.inbox.end(grant.id, lambda: ended.append("grant"))
    channel.close()
    await until(lambda: bool(ended))
    await holder.inbox.shut()


async def test_bytes_in_the_kernel_do_not_reach_the_pool_after_a_tcp_fence() -> None:
    holder = Holder("tcp")
    grant = holder.grant([2, 3])
    channel = await half_a_frame(holder, grant.id)
    channel._sock.send(
        b"\xab" * SHARD.block_bytes
    )  # the holder's loop has not run since: these wait in the kernel
    await holder.receiver.fence("writer", grant.id)
    holder.buffer[:] = bytes(len(holder.buffer))
    await asyncio.sleep(0.02)
    assert bytes(holder.buffer) == bytes(len(holder.buffer))
    channel.close()
    await holder.inbox.shut()


async def test_a_refused_frame_of_any_size_is_read_and_the_channel_goes_on() -> None:
    holder = Holder("tcp")
    source = memoryview(bytearray(3 << 20))
    sender = TcpSender(KEY, WRITER, source, checksum=False, num_streams=1)
    grant = holder.grant([2])
    await sender.write("nobody's", grant.regions[0], [CopyRun(0, 0, 3 << 20)])
    source[: SHARD.block_bytes] = b"x" * SHARD.block_bytes
    await sender.write(grant.id, grant.regions[0], runs_for([2], [0]))
    await until(lambda: holder.block(0, 2) == b"x" * SHARD.block_bytes)
    assert holder.num_refused == 1
    await sender.close()
    await holder.inbox.shut()


def _die_with_a_segment(queue: Any) -> None:
    segment = SharedSegment(4096)
    os.symlink("1:2", f"{segment.path}-0123456789abcdef")  # a writer's claim
    queue.put(str(segment.path))
    signal.pause()


def test_the_segment_of_a_killed_owner_is_removed() -> None:
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    owner = context.Process(target=_die_with_a_segment, args=(queue,), daemon=True)
    owner.start()
    path = queue.get(timeout=30)
    remove_orphans()
    assert os.path.exists(path), "its owner lives"
    owner.kill()
    owner.join()
    remove_orphans()
    assert not os.path.exists(path)
    assert not os.path.lexists(f"{path}-0123456789abcdef")
    queue.close()
