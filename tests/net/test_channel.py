import asyncio
import os
from typing import Any

import msgpack
import pytest

from core.errors import ProtocolError, ReplicaLost
from net import channel as channel_module
from net.channel import Channel, Identity, Listener, connect
from tests.patience import PATIENCE_S

KEY = b"k" * 32
DIALLER = Identity("a:1", "x", 1)


class Server:
    """Accepts channels and hands them to the test."""

    def __init__(self, key: bytes = KEY) -> None:
        self.refused: list[str] = []
        self.channels: asyncio.Queue[Channel] = asyncio.Queue()
        self.listener = Listener("127.0.0.1", key, self._serve, self.refused.append)
        self.listener.start(Identity(self.listener.address, "y", os.getpid()))

    async def _serve(self, channel: Channel) -> None:
        await self.channels.put(channel)
        await asyncio.Event().wait()


@pytest.fixture
async def server():
    server = Server()
    yield server
    await server.listener.close()


async def test_both_sides_learn_who_the_other_is(server: Server) -> None:
    ours = await connect(server.listener.address, KEY, DIALLER)
    theirs = await server.channels.get()
    assert theirs.peer == DIALLER
    assert ours.peer == Identity(server.listener.address, "y", os.getpid())
    ours.close()


@pytest.mark.parametrize("size", [0, 1, 70_000, 5_000_000])
async def test_payload_lands_in_the_callers_memory(server: Server, size: int) -> None:
    ours = await connect(server.listener.address, KEY, DIALLER)
    theirs = await server.channels.get()
    data = os.urandom(size)
    half = size // 2
    pieces = [memoryview(data)[:half], memoryview(data)[half:]]
    sending = asyncio.create_task(ours.send(["kv", 7], pieces))
    header, payload_bytes = await theirs.recv()
    target = bytearray(payload_bytes)
    await theirs.readinto(memoryview(target))
    await sending
    assert msgpack.unpackb(header) == ["kv", 7]
    assert target == data
    ours.close()


async def test_many_frames_in_one_write_arrive_in_order(server: Server) -> None:
    ours = await connect(server.listener.address, KEY, DIALLER)
    theirs = await server.channels.get()
    heads = [os.urandom(i * 97 % 9000) for i in range(200)]
    sending = asyncio.create_task(ours.send_many(heads))
    assert [(await theirs.recv())[0] for _ in heads] == heads
    await sending
    ours.close()


async def test_a_wrong_key_is_refused_on_both_sides(server: Server) -> None:
    with pytest.raises((ProtocolError, ReplicaLost)):
        await connect(server.listener.address, b"wrong" * 8, DIALLER)
    async with asyncio.timeout(PATIENCE_S):
        while not server.refused:
            await asyncio.sleep(0.01)
    assert server.channels.empty()


@pytest.mark.parametrize("pid", ["x", None, [1], float("inf")])
async def test_a_peer_whose_identity_cannot_be_read_is_refused(server: Server, pid: Any) -> None:
    ours = await connect(server.listener.address, KEY, Identity("a:1", "x", pid))
    async with asyncio.timeout(PATIENCE_S):
        with pytest.raises(ReplicaLost):
            await ours.recv()
    assert ["identity" in why for why in server.refused] == [True]
    ours.close()


async def test_a_stranger_that_reflects_our_proof_is_refused() -> None:
    done = asyncio.Event()

    async def reflect(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(4096):
            writer.write(data)
        writer.close()
        await writer.wait_closed()
        done.set()

    mirror = await asyncio.start_server(reflect, "127.0.0.1", 0)
    port = mirror.sockets[0].getsockname()[1]
    with pytest.raises(ProtocolError, match="cluster key"):
        await connect(f"127.0.0.1:{port}", KEY, DIALLER)
    await asyncio.wait_for(done.wait(), PATIENCE_S)
    mirror.close()
    await mirror.wait_closed()


async def test_closing_ends_a_peer_that_waits(server: Server) -> None:
    ours = await connect(server.listener.address, KEY, DIALLER)
    theirs = await server.channels.get()
    waiting = asyncio.create_task(theirs.recv())
    own_wait = asyncio.create_task(ours.recv())
    await asyncio.sleep(0)
    ours.close()
    for task in (waiting, own_wait):
        with pytest.raises(ReplicaLost):
            await asyncio.wait_for(task, PATIENCE_S)
    with pytest.raises(ReplicaLost):
        await ours.send(["late"])


async def test_nobody_there_is_said_plainly() -> None:
    with pytest.raises(ReplicaLost, match="cannot connect to 127.0.0.1:1"):
        await connect("127.0.0.1:1", KEY, DIALLER)


async def test_strangers_who_say_nothing_make_room(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channel_module, "MAX_STRANGERS", 8)
    host, _, port = server.listener.address.rpartition(":")
    silent = [await asyncio.open_connection(host, int(port)) for _ in range(30)]
    async with asyncio.timeout(PATIENCE_S / 20):  # less than a handshake may take
        for reader, _ in silent[:20]:
            await reader.read()
        ours = await connect(server.listener.address, KEY, DIALLER)
        await server.channels.get()
    ours.close()
    for _, writer in silent:
        writer.close()
