"""What processes of a cluster send each other, as somebody who knows the cluster's key may: mail, and descriptions of KV."""

import asyncio
import hashlib
import hmac
import os
import socket
import struct
from typing import Any

from core.errors import ProtocolError, ReplicaLost, TransferError
from core.kv import KVLayout, KVShard
from core.messages import Grant, RegionKey
from engine.ranks.rank_messages import FROM_RANK, TO_RANK
from kvtransfer.wire import agree, check_compatible, check_grant, content_of, unpack
from net.channel import Channel, Identity, Listener
from net.codec import decode, decode_one_of, encode
from net.session import NOBODY, Session
from tests.fuzz.choices import Choices
from tests.fuzz.http_targets import loop

_KEY = b"fuzz"
_MAGIC = b"BATON1\r\n"
_HELLO = struct.Struct("<8s32sH")
_FRAME = struct.Struct("<IQ")
_SHARD = KVShard.whole(KVLayout(num_layers=2, num_kv_heads=2, head_dim=4, block_size=4, dtype="float32"))
_KINDS: list[dict[str, type[Any]]] = [TO_RANK, FROM_RANK, {"Grant": Grant, "RegionKey": RegionKey}]


def fuzz_messages(data: bytes) -> None:
    """A message is read so that it can be written and read again, or it is refused."""
    choices = Choices(data)
    kinds = choices.pick([None, *_KINDS])
    packed = choices.rest()

    def read(one: bytes) -> Any:
        return decode(one) if kinds is None else decode_one_of(kinds, one)

    try:
        message = read(packed)
    except ProtocolError:
        return
    written = encode(message)
    assert encode(read(written)) == written, message


def fuzz_session(data: bytes) -> None:
    """Frames of a session bring messages in order and once, or they are refused."""
    choices = Choices(data)
    session = Session(bytes(15) + b"\x01")
    for _ in range(choices.below(4)):
        session.stamp(b"mine")
    try:
        if choices.below(2):
            session.attach(struct.pack("<BQQ", 0, choices.below(5), 0) + choices.take(16) + NOBODY)
        while choices.num_left:
            kind, number, acknowledged = choices.below(5), choices.below(8), choices.below(8)
            frame = (
                choices.piece(40)
                if kind == 4
                else struct.pack("<BQQ", kind, number, acknowledged) + choices.piece(3)
            )
            heard = session.on_frame(frame)
            assert len(heard.messages) <= 8
    except ProtocolError:
        return
    session.beat()
    session.unacknowledged()


async def _exactly(sock: socket.socket, num_bytes: int) -> bytes:
    data = b""
    while len(data) < num_bytes:
        piece = await asyncio.get_running_loop().sock_recv(sock, num_bytes - len(data))
        if not piece:
            raise ConnectionResetError
        data += piece
    return data


async def _prove(sock: socket.socket, identity: bytes) -> None:
    """Prove the cluster's key, as a peer of any other release would."""
    nonce = os.urandom(32)
    running = asyncio.get_running_loop()
    await running.sock_sendall(sock, _HELLO.pack(_MAGIC, nonce, len(identity)) + identity)
    _, theirs, size = _HELLO.unpack(await _exactly(sock, _HELLO.size))
    await _exactly(sock, size)
    proof = hmac.new(_KEY, b"d" + nonce + theirs + identity, hashlib.sha256).digest()
    await running.sock_sendall(sock, proof)


async def _mailed(identity: bytes, proves: bool, sent: bytes) -> None:
    failures: list[Any] = []

    async def serve(channel: Channel) -> None:
        session = Session(os.urandom(16))
        try:
            session.attach((await channel.recv())[0])
            while True:
                frame, num_bytes = await channel.recv()
                await channel.readinto(memoryview(bytearray(min(num_bytes, 1 << 16))))
                for message in session.on_frame(frame).messages:
                    decode(message)
        except (ReplicaLost, ProtocolError):
            return
        except BaseException as error:
            failures.append(error)
            raise

    asyncio.get_running_loop().set_exception_handler(lambda _, context: failures.append(context))
    listener = Listener("127.0.0.1", _KEY, serve, lambda _: None)
    listener.start(Identity(listener.address, "i", 1))
    with socket.socket() as sock:
        sock.setblocking(False)
        host, _, port = listener.address.rpartition(":")
        await asyncio.get_running_loop().sock_connect(sock, (host, int(port)))
        try:
            if proves:
                await _prove(sock, identity)
            await asyncio.get_running_loop().sock_sendall(sock, sent)
            sock.shutdown(socket.SHUT_WR)
            async with asyncio.timeout(10):
                while await asyncio.get_running_loop().sock_recv(sock, 65536):
                    pass
        except OSError:
            pass  # it was refused
    await listener.close()
    await asyncio.sleep(0)
    assert not failures, failures


def fuzz_mail(data: bytes) -> None:
    """A peer with any name that sends any frames is heard, or refused, and no task of the listener fails."""
    choices = Choices(data)
    proves, identity = choices.below(4) > 0, choices.piece(40)
    sent = b""
    while choices.num_left:
        if choices.below(6) == 5:
            sent += choices.piece(32)
        else:
            head = choices.piece(48)
            sent += _FRAME.pack(len(head), 0) + head
    loop().run(_mailed(identity, proves, sent))


def fuzz_kv(data: bytes) -> None:
    """A description of a KV pool, and a grant, is one that a writer can follow, or it is refused."""
    choices = Choices(data)
    if choices.below(2):
        try:
            theirs = unpack(choices.rest())
            agree(content_of(_SHARD, "m"), theirs)
        except TransferError:
            return
        return
    try:
        grant: Grant = decode_one_of({"Grant": Grant}, choices.rest())
        check_grant(grant)
        for region in grant.regions:
            check_compatible(_SHARD, region)
    except (TransferError, ProtocolError):
        return
