"""After its fence a writer that is dead, stopped or late changes nothing, whatever the transport."""

import asyncio
import contextlib
import os
import signal
import socket
import struct
import threading
from collections.abc import Callable, Sequence
from typing import Any

import msgpack
import pytest

from core.errors import ReplicaLost, TransferError
from core.messages import Grant, RegionKey
from kvtransfer.copies import CopyRun
from kvtransfer.transport.base import Sender
from kvtransfer.transport.loopback_transport import LoopbackFabric
from kvtransfer.transport.pull import Intake
from kvtransfer.transport.shm import SharedSegment, remove_orphans
from kvtransfer.transport.tcp import TcpSender
from net.channel import Identity, connect
from tests.contract.transports import (
    BLOCKS,
    IN_HOST_MEMORY,
    KEY,
    PULLED,
    REMOTE,
    SHARD,
    WRITER,
    Holder,
    make_sender,
    runs_for,
    source_for,
)
from tests.forked import FORKED
from tests.patience import PATIENCE_S, until

DEADLINE_S = 120.0
"""Within which a busy machine does anything that happens at all."""


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
    started = FORKED.Event()
    writer = FORKED.Process(
        target=_write_forever, args=(kind, grant.regions[0], grant.id, started), daemon=True
    )
    writer.start()
    try:
        assert await asyncio.to_thread(started.wait, DEADLINE_S), "the writer process has not begun"
        await until(lambda: holder.block(1, 2) == b"\xab" * SHARD.block_bytes)
        fence = asyncio.create_task(holder.inbox.fence(grant.id, "writer"))
        if kind == "shm":
            await asyncio.sleep(0.05)
            assert not fence.done(), "a living process with a mapping is not fenced"
        else:
            await asyncio.wait_for(asyncio.shield(fence), DEADLINE_S)
        writer.kill()  # unless it has ended by itself: a fenced writer's channel may be closed
        await asyncio.wait_for(fence, DEADLINE_S)
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
    started = FORKED.Event()
    writer = FORKED.Process(
        target=_write_forever, args=(kind, grant.regions[0], grant.id, started), daemon=True
    )
    writer.start()
    try:
        assert await asyncio.to_thread(started.wait, DEADLINE_S), "the writer process has not begun"
        os.kill(writer.pid or 0, signal.SIGSTOP)
        async with asyncio.timeout(DEADLINE_S):
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


async def connected(holder: Holder) -> tuple[Sender, Grant, Intake]:
    """A sender that has written once, its grant, and the holder's end of its medium."""
    source = source_for(holder.kind, b"\xab" * SHARD.pool_bytes(BLOCKS))
    sender = make_sender(holder.kind, holder.fabric, source)
    grant = holder.grant([2, 3])
    await sender.write(grant.id, grant.regions[0], runs_for([2], [0]))
    assert holder.medium is not None
    (intake,) = holder.medium.intakes
    return sender, grant, intake


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
    sender, grant, _ = await connected(holder)
    begun, go_on = threading.Event(), threading.Event()

    def held(call: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            begun.set()
            assert go_on.wait(PATIENCE_S)
            return call(*args)

        return run

    medium: Any = holder.medium.medium if holder.medium else None
    if holder.kind == "nixl":
        monkeypatch.setattr(medium, "before", held(medium.before))
    else:
        monkeypatch.setattr(medium.pool, "order", held(medium.pool.order))
    writing = asyncio.create_task(sender.write(grant.id, grant.regions[0], runs_for([3], [0])))
    assert await asyncio.to_thread(begun.wait, PATIENCE_S)
    fence = asyncio.create_task(holder.inbox.fence(grant.id, "writer"))
    await asyncio.sleep(0.05)
    assert not fence.done(), "the fetch could still change blocks that belong to somebody else by now"
    go_on.set()
    async with asyncio.timeout(DEADLINE_S):
        await fence
    holder.buffer[:] = bytes(len(holder.buffer))
    with contextlib.suppress(ReplicaLost, TransferError):
        await writing
    assert bytes(holder.buffer) == bytes(len(holder.buffer))
    await sender.close()


@pytest.mark.parametrize("kind", IN_HOST_MEMORY)
@pytest.mark.parametrize("num_times", [1, 2])
async def test_a_damaged_fetch_is_made_again_and_then_given_up(kind: str, num_times: int) -> None:
    holder = Holder(kind)
    source = memoryview(bytearray(os.urandom(SHARD.pool_bytes(BLOCKS))))
    sender = make_sender(kind, holder.fabric, source, checksum=True)
    left = [num_times]

    def damage(runs: Sequence[CopyRun]) -> None:
        if left[0]:
            left[0] -= 1
            holder.buffer[runs[0].destination] ^= 1

    assert holder.medium is not None
    holder.medium.fetched = damage
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
    async with asyncio.timeout(DEADLINE_S):
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


async def half_a_frame(holder: Holder, grant_id: str) -> socket.socket:
    """A writer whose first run has arrived and whose second has not."""
    (region,) = holder.inbox.regions()
    channel = await connect(region.endpoint, KEY, WRITER)
    size = SHARD.block_bytes
    head = msgpack.packb([grant_id, [2 * size, 3 * size], [size, size], None, 0])
    sock = channel.detach()
    sock.sendall(struct.pack("<IQ", len(head), 2 * size) + head + b"\xab" * size)
    await until(lambda: holder.block(0, 2) == b"\xab" * size)
    return sock


async def test_a_last_word_that_overtakes_a_tcp_frame_waits_for_it() -> None:
    holder = Holder("tcp")
    grant = holder.grant([2, 3])
    sock = await half_a_frame(holder, grant.id)
    ended: list[str] = []
    holder.inbox.end(grant.id, lambda: ended.append("grant"))
    await asyncio.sleep(0.02)
    assert not ended, "the rest of the frame would be written into blocks that were given away"
    assert holder.inbox.num_live == 1
    sock.sendall(b"\xab" * SHARD.block_bytes)
    await until(lambda: bool(ended))
    assert holder.inbox.num_live == 0
    sock.close()
    await holder.inbox.shut()


async def test_a_writer_that_dies_within_a_frame_does_not_keep_its_blocks() -> None:
    holder = Holder("tcp")
    grant = holder.grant([2, 3])
    sock = await half_a_frame(holder, grant.id)
    ended: list[str] = []
    holder.inbox.end(grant.id, lambda: ended.append("grant"))
    sock.close()
    await until(lambda: bool(ended))
    await holder.inbox.shut()


async def test_bytes_in_the_kernel_do_not_reach_the_pool_after_a_tcp_fence() -> None:
    holder = Holder("tcp")
    grant = holder.grant([2, 3])
    sock = await half_a_frame(holder, grant.id)
    # The holder's loop does not run before the fence: these bytes wait in the kernel.
    sock.sendall(b"\xab" * SHARD.block_bytes)
    await holder.receiver.fence("writer", grant.id)
    holder.buffer[:] = bytes(len(holder.buffer))
    await asyncio.sleep(0.02)
    assert bytes(holder.buffer) == bytes(len(holder.buffer))
    sock.close()
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
    queue = FORKED.Queue()
    owner = FORKED.Process(target=_die_with_a_segment, args=(queue,), daemon=True)
    owner.start()
    path = queue.get(timeout=PATIENCE_S)
    remove_orphans()
    assert os.path.exists(path), "its owner lives"
    owner.kill()
    owner.join()
    remove_orphans()
    assert not os.path.exists(path)
    assert not os.path.lexists(f"{path}-0123456789abcdef")
    queue.close()
