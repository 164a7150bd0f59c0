"""One authenticated, framed TCP connection, inside TLS where it leaves the host and `tls` is given.

A frame is `u32 header length, u64 payload length`, a msgpack header and a raw payload. Both sides prove that they know the
cluster key before anything else is read: each sends a nonce, then HMAC-SHA256 over (role, both nonces, its identity). The
role byte keeps a proof from being reflected. A side that takes TLS alone says so to a peer that does not speak it. The payload of
a frame can be received straight into the caller's memory.

Invariant: header and payload of a frame are read completely, in order, or the channel is broken and closed."""

import asyncio
import contextlib
import hashlib
import hmac
import os
import socket
import ssl
import struct
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

import msgpack

from core.errors import ProtocolError, ReplicaLost
from net.socket_io import (
    PlainPeer,
    accept_tls,
    dial_tls,
    in_words,
    let_go,
    recv_into,
    send_all,
    stays_on_host,
)
from net.tls import Tls

_MAGIC = b"BATON1\r\n"
_TLS_ALONE = b"BATONTLS"
"""Instead of `_MAGIC`, to a peer on another host that speaks no TLS."""
_TLS_HEAD = b"\x16\x03"
"""How a peer begins that speaks TLS."""
_FRAME = struct.Struct("<IQ")
_HELLO = struct.Struct("<8s32sH")
_MAX_IDENTITY_BYTES = 1024
_MAX_HEADER_BYTES = 256 << 20
_READ_BYTES = 1 << 16
_HANDSHAKE_S = 5.0
MAX_STRANGERS = 1024
"""Connections that may be proving the key at once. One more takes the place of the oldest: who knows it needs milliseconds."""


@dataclass(frozen=True, slots=True)
class Identity:
    """The mail address of a process, and its incarnation (a restart on the same address is another one)."""

    address: str
    incarnation: str
    pid: int


class Channel:
    """Frames to and from one authenticated peer. One task may send and one may receive at a time."""

    def __init__(self, sock: socket.socket, peer: Identity) -> None:
        self.peer = peer
        self._sock = sock
        self._buffer = memoryview(bytearray(_READ_BYTES))
        self._start = self._end = 0
        self._closed = False
        self._num_waiting = 0

    async def send(self, header: Any, payload: Sequence[memoryview] = ()) -> None:
        """Returns when the kernel has taken every byte, so `payload` may be reused. Raises ReplicaLost."""
        head: bytes = msgpack.packb(header)  # type: ignore[assignment]
        size = sum(piece.nbytes for piece in payload)
        await self._send_all([memoryview(_FRAME.pack(len(head), size) + head), *payload])

    async def send_many(self, headers: Sequence[bytes]) -> None:
        """Send several payload-free frames in one write. Raises ReplicaLost."""
        joined = b"".join([part for head in headers for part in (_FRAME.pack(len(head), 0), head)])
        await self._send_all([memoryview(joined)])

    async def recv(self) -> tuple[bytes, int]:
        """Return the next frame's packed header and its payload's size in bytes, which must then be taken with `readinto`. Raises
        ReplicaLost at the end of the stream and ProtocolError for an impossible frame."""
        await self._fill(_FRAME.size)
        header_bytes, payload_bytes = _FRAME.unpack_from(self._buffer, self._start)
        self._start += _FRAME.size
        if header_bytes > _MAX_HEADER_BYTES:
            raise ProtocolError(f"peer {self.peer.address} announces a header of {header_bytes} bytes")
        header = bytearray(header_bytes)
        await self.readinto(memoryview(header))
        return bytes(header), payload_bytes

    async def readinto(self, target: memoryview) -> None:
        """Fill `target` from the payload. Raises ReplicaLost."""
        have = min(self._end - self._start, target.nbytes)
        target = target.cast("B")
        target[:have] = self._buffer[self._start : self._start + have]
        self._start += have
        while have < target.nbytes:
            have += await self._recv_into(target[have:])

    @property
    def stays_on_host(self) -> bool:
        return stays_on_host(self._sock)

    def detach(self) -> socket.socket:
        """Return the authenticated connection itself, blocking, which the caller then owns and closes. Call it before any frame
        is read."""
        assert not self._closed
        assert self._start == self._end, "bytes of a frame would be lost"
        self._closed = True
        self._sock.setblocking(True)  # noqa: FBT003 (it takes no name)
        return self._sock

    def close(self) -> None:
        """Cut the connection: nothing more is read or written, also by a task that is waiting. Idempotent."""
        if not self._closed:
            self._closed = True
            with contextlib.suppress(OSError):  # the peer may have been faster
                # Not SSLSocket.shutdown: after that, reads return what is still encrypted.
                socket.socket.shutdown(self._sock, socket.SHUT_RDWR)
            self._close_when_idle()

    def _close_when_idle(self) -> None:
        # The event loop still watches the descriptor for an operation in flight: shutdown ends it, then it is closed.
        if self._closed and not self._num_waiting:
            self._sock.close()

    async def _send_all(self, pieces: list[memoryview]) -> None:
        self._num_waiting += 1
        try:
            for piece in self._send_now(pieces):
                await send_all(self._sock, piece)
        except (OSError, ValueError) as error:
            raise ReplicaLost(f"connection to {self.peer.address} broke while sending: {error}") from error
        finally:
            self._num_waiting -= 1
            self._close_when_idle()

    def _send_now(self, pieces: list[memoryview]) -> list[memoryview]:
        """Write what can be written at once, and return what is left."""
        if self._closed:
            raise OSError("closed")
        if isinstance(self._sock, ssl.SSLSocket):
            return pieces
        try:
            sent = self._sock.sendmsg(pieces[:512])
        except BlockingIOError:
            return pieces
        rest: list[memoryview] = []
        for piece in pieces:
            if sent >= piece.nbytes:
                sent -= piece.nbytes
            else:
                rest.append(piece.cast("B")[sent:] if sent else piece)
                sent = 0
        return rest

    async def _fill(self, num_bytes: int) -> None:
        have = self._end - self._start
        if have >= num_bytes:
            return
        self._buffer[:have] = bytes(self._buffer[self._start : self._end])
        self._start, self._end = 0, have
        while self._end < num_bytes:
            self._end += await self._recv_into(self._buffer[self._end :])

    async def _recv_into(self, target: memoryview) -> int:
        self._num_waiting += 1
        try:
            count = 0 if self._closed else await recv_into(self._sock, target)
        except (OSError, ValueError) as error:
            raise ReplicaLost(f"connection to {self.peer.address} broke: {error}") from error
        finally:
            self._num_waiting -= 1
            self._close_when_idle()
        if not count:
            raise ReplicaLost(f"peer {self.peer.address} closed the connection")
        return count


async def connect(
    address: str, key: bytes, me: Identity, timeout_s: float = _HANDSHAKE_S, *, tls: Tls | None = None
) -> Channel:
    """Connect to `host:port` and authenticate both ways. Raises ReplicaLost or ProtocolError."""
    host, _, port = address.rpartition(":")
    loop = asyncio.get_running_loop()
    sock = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    sock.setblocking(False)  # noqa: FBT003 (it takes no name)
    try:
        async with asyncio.timeout(timeout_s):
            await loop.sock_connect(sock, (host.strip("[]"), int(port)))
            _tune(sock)
            sock = await dial_tls(sock, tls)
            peer = await _handshake(sock, key, me, dialled=True)
    except TimeoutError as error:
        sock.close()
        raise ReplicaLost(f"no answer from {address} within {timeout_s:g} s") from error
    except ssl.SSLError as error:
        sock.close()
        raise ProtocolError(f"no TLS with {address}: {in_words(error)}") from error
    except OSError as error:
        sock.close()
        raise ReplicaLost(f"cannot connect to {address}: {error.strerror or error}") from error
    except BaseException:
        sock.close()
        raise
    return Channel(sock, peer)


class Listener:
    """Accepts authenticated channels on `host`; `address` is known once constructed.

    `serve(channel)` runs as a task for each peer; `on_refused` hears of peers that failed to authenticate."""

    def __init__(
        self,
        host: str,
        key: bytes,
        serve: Callable[[Channel], Awaitable[None]],
        on_refused: Callable[[str], None],
        port: int = 0,
        *,
        tls: Tls | None = None,
    ) -> None:
        self._sock = socket.create_server((host, port), backlog=512)
        self._sock.setblocking(False)  # noqa: FBT003 (it takes no name)
        self._key, self._tls, self._serve, self._on_refused = key, tls, serve, on_refused
        self._tasks: set[asyncio.Task[None]] = set()
        self._accepted: set[socket.socket] = set()
        """Channels that no `serve` has yet: a task that is cancelled before it begins closes nothing."""
        self._strangers: dict[socket.socket, asyncio.Task[None]] = {}
        """Connections that have not proved the key yet, the oldest first."""
        self._closed = False
        self.address = f"{host}:{self._sock.getsockname()[1]}"

    def start(self, me: Identity) -> None:
        """Start accepting. Call it in the event loop."""
        self._watch(me)

    async def close(self) -> None:
        """Idempotent."""
        if self._closed:
            return
        self._closed = True
        asyncio.get_running_loop().remove_reader(self._sock)
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for sock in (self._sock, *self._accepted):
            sock.close()

    def _watch(self, me: Identity) -> None:
        if not self._closed:
            asyncio.get_running_loop().add_reader(self._sock, self._accept, me)

    def _accept(self, me: Identity) -> None:
        loop = asyncio.get_running_loop()
        try:
            sock, _ = self._sock.accept()
        except BlockingIOError:  # the peer has left before it was accepted
            return
        except OSError as error:  # such as: no file descriptor is left
            self._on_refused(f"accept failed: {error}")
            loop.remove_reader(self._sock)
            loop.call_later(0.1, self._watch, me)
            return
        self._accepted.add(sock)
        self._strangers[sock] = self._spawn(self._welcome(sock, me))
        if len(self._strangers) > MAX_STRANGERS:
            self._strangers.pop(next(iter(self._strangers))).cancel()

    async def _welcome(self, sock: socket.socket, me: Identity) -> None:
        self._accepted.discard(sock)
        try:
            _tune(sock)
            async with asyncio.timeout(_HANDSHAKE_S):
                channel = await self._met(sock, me)
        except (TimeoutError, OSError, ReplicaLost, ProtocolError) as error:
            sock.close()
            self._on_refused(str(error) or type(error).__name__)
            return
        except BaseException:
            sock.close()
            raise
        finally:
            self._strangers.pop(sock, None)
        try:
            await self._serve(channel)
        finally:
            channel.close()

    async def _met(self, accepted: socket.socket, me: Identity) -> Channel:
        """Raises OSError, ReplicaLost and ProtocolError."""
        sock = await _encrypted(accepted, self._tls)
        try:
            return Channel(sock, await _handshake(sock, self._key, me, dialled=False))
        except BaseException:
            sock.close()
            raise

    def _spawn(self, work: Any) -> asyncio.Task[None]:
        task: asyncio.Task[None] = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


def _tune(sock: socket.socket) -> None:
    sock.setblocking(False)  # noqa: FBT003 (it takes no name)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (
        ("TCP_KEEPIDLE", 5),
        ("TCP_KEEPINTVL", 2),
        ("TCP_KEEPCNT", 3),
        ("TCP_USER_TIMEOUT", 15_000),
    ):
        if hasattr(socket, option):
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)


async def _encrypted(sock: socket.socket, tls: Tls | None) -> socket.socket:
    """Return what was accepted, encrypted where it must be. Raises ReplicaLost and ProtocolError."""
    try:
        return await accept_tls(sock, tls)
    except PlainPeer:
        await send_all(sock, memoryview(_HELLO.pack(_TLS_ALONE, bytes(32), 0)))
        await let_go(sock)
        raise


async def _handshake(sock: socket.socket, key: bytes, me: Identity, *, dialled: bool) -> Identity:
    identity: bytes = msgpack.packb([me.address, me.incarnation, me.pid])  # type: ignore[assignment]
    nonce = os.urandom(32)
    await send_all(sock, memoryview(_HELLO.pack(_MAGIC, nonce, len(identity)) + identity))
    magic, peer_nonce, size = _HELLO.unpack(await _exactly(sock, _HELLO.size))
    if magic == _TLS_ALONE:
        raise ProtocolError("the other side takes TLS alone, and this one speaks none: see security.tls")
    if magic.startswith(_TLS_HEAD):
        raise ProtocolError("the peer speaks TLS, and security.tls is off here")
    if magic != _MAGIC or size > _MAX_IDENTITY_BYTES:
        raise ProtocolError("the other side does not speak Baton's protocol, version 1")
    peer_identity = await _exactly(sock, size)
    mine, theirs = (b"d", b"a") if dialled else (b"a", b"d")
    await send_all(sock, memoryview(_proof(key, mine, nonce, peer_nonce, identity)))
    proof = await _exactly(sock, 32)
    if not hmac.compare_digest(proof, _proof(key, theirs, peer_nonce, nonce, peer_identity)):
        raise ProtocolError("the peer does not know the cluster key")
    return _read_identity(peer_identity)


def _proof(key: bytes, role: bytes, own_nonce: bytes, other_nonce: bytes, identity: bytes) -> bytes:
    return hmac.new(key, role + own_nonce + other_nonce + identity, hashlib.sha256).digest()


def _read_identity(packed: bytes) -> Identity:
    try:
        address, incarnation, pid = msgpack.unpackb(packed)
    except (ValueError, TypeError, msgpack.UnpackException) as error:
        raise ProtocolError(f"unreadable identity: {error}") from error
    if not (isinstance(address, str) and isinstance(incarnation, str) and isinstance(pid, int)):
        raise ProtocolError(
            f"an identity is two texts and a number, not {[address, incarnation, pid]!r:.200}"
        )
    return Identity(address, incarnation, pid)


async def _exactly(sock: socket.socket, num_bytes: int) -> bytes:
    data, have = memoryview(bytearray(num_bytes)), 0
    while have < num_bytes:
        count = await recv_into(sock, data[have:])
        if not count:
            raise ReplicaLost("the peer closed the connection while authenticating (a wrong cluster key?)")
        have += count
    return bytes(data)
