"""One suite over every KV transport: what arrives, what is refused, what is damaged on the way."""

import asyncio
import os
import random
import threading
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from core.errors import ReplicaLost, TransferError
from kvtransfer.copies import CopyRun
from kvtransfer.transport import shm
from kvtransfer.transport.checks import destination_crc
from kvtransfer.transport.shm import ShmSender
from kvtransfer.transport.tcp import TcpReceiver, TcpSender
from kvtransfer.transport.write_admission import WriteAdmission
from net.channel import Identity, connect
from tests.contract.transports import (
    BLOCKS,
    KEY,
    REMOTE,
    SHARD,
    WRITER,
    Holder,
    commit,
    make_sender,
    runs_for,
    source_for,
    write_or_refused,
)
from tests.patience import PATIENCE_S, until


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
@pytest.mark.parametrize("holder", ["loopback", "loopback on a device", *REMOTE], indirect=True)
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
    left = [num_times]

    def damaged(view: memoryview, runs: Sequence[CopyRun]) -> int:
        if left[0]:
            left[0] -= 1
            view[runs[0].destination] ^= 1
        return destination_crc(view, runs)

    monkeypatch.setattr(shm, "destination_crc", damaged)
    grant = holder.grant([2])
    if num_times < 2:
        await sender.write(grant.id, grant.regions[0], runs_for([2], [0]))
        assert holder.block(0, 2) == bytes(source[: SHARD.block_bytes])
    else:
        with pytest.raises(TransferError, match="corrupted twice"):
            await sender.write(grant.id, grant.regions[0], runs_for([2], [0]))
    await sender.close()
    await holder.inbox.shut()


@pytest.mark.parametrize("long_bytes", [0, 1 << 40], ids=["in one go", "in pieces"])
async def test_long_writes_into_shared_memory_leave_the_loop_its_turns(
    long_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shm, "TURN_BYTES", 100)
    monkeypatch.setattr(shm, "LONG_BYTES", long_bytes)
    holder = Holder("shm")
    source = memoryview(bytearray(os.urandom(SHARD.pool_bytes(BLOCKS))))
    sender, grant = ShmSender(source), holder.grant([2, 3])
    writing = asyncio.create_task(sender.write(grant.id, grant.regions[0], runs_for([2, 3], [0, 1])))
    await asyncio.sleep(0)
    assert not writing.done()
    await writing
    for block, start in ((2, 0), (3, SHARD.block_bytes)):
        assert holder.block(0, block) == bytes(source[start : start + SHARD.block_bytes])
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


async def test_who_fails_while_another_writer_connects_anew_is_told_that_the_holder_is_lost() -> None:
    asked, go_on = threading.Event(), threading.Event()

    def ask(*_: Any) -> bool:
        asked.set()
        return go_on.wait(PATIENCE_S)

    size = 64 << 20
    source = memoryview(bytearray(size))
    me = Identity("holder", "h1", os.getpid())
    receiver = TcpReceiver(KEY, me, "127.0.0.1", source, WriteAdmission(ask, lambda *_: None, lambda _: None))
    region = receiver.region(SHARD, BLOCKS)
    sender = TcpSender(KEY, WRITER, source, checksum=False, num_streams=1)

    async def write_twice() -> None:
        for _ in range(2):
            with pytest.raises(ReplicaLost):
                await sender.write("g", region, [CopyRun(0, 0, size)])

    writing = [asyncio.create_task(write_twice()) for _ in range(2)]
    await until(asked.is_set)
    closing = asyncio.create_task(receiver.close())
    await asyncio.gather(*writing)
    go_on.set()
    await closing
    await sender.close()


async def test_many_streams_and_many_runs_arrive_whole() -> None:
    """More runs than one system call takes, more bytes than one stream gets, in no order."""
    size, num = 1024, 6000
    pool = memoryview(bytearray(size * num))
    got: list[int] = []
    me = Identity("holder", "h1", os.getpid())
    receiver = TcpReceiver(
        KEY,
        me,
        "127.0.0.1",
        pool,
        WriteAdmission(lambda *_: True, lambda _, n: got.append(n), lambda _: None),
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


@pytest.mark.parametrize("attempt", [None, "1", [1]])
async def test_a_damaged_frame_whose_header_has_other_types_does_not_hold_its_grant(attempt: Any) -> None:
    pool = memoryview(bytearray(64))
    admission = WriteAdmission(lambda *_: True, lambda *_: None, lambda _: None)
    me = Identity("holder", "h1", os.getpid())
    receiver = TcpReceiver(KEY, me, "127.0.0.1", pool, admission)
    channel = await connect(receiver.region(SHARD, BLOCKS).endpoint, KEY, WRITER)
    wrong_crc = 1
    await channel.send(["g", [0], [4], wrong_crc, attempt], [memoryview(b"abcd")])
    with pytest.raises(ReplicaLost):
        await channel.recv()
    await receiver.fence(WRITER.address, "g")
    idle: list[bool] = []
    admission.when_idle("g", lambda: idle.append(True))
    assert idle, "the grant's blocks would never be freed"
    assert not any(pool)
    channel.close()
    await receiver.close()
