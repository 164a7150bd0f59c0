"""Reads and writes on the event loop, of a connected socket that is plain or speaks TLS, and how a connection becomes the latter.

A connection between two processes of one host stays plain: nobody else can read it. That is decided for each connection: both
ends of it have the same address. All others are encrypted where `tls` is given, and a side that has it takes nothing else."""

import asyncio
import contextlib
import socket
import ssl
from collections.abc import Callable
from typing import Any, TypeVar

from core.errors import ProtocolError, ReplicaLost
from net.tls import Tls

R = TypeVar("R")

_TLS_HANDSHAKE = b"\x16"
"""The first byte of a TLS connection."""
_NO_TLS = "it does not speak TLS (its security.tls is off, or its release has no TLS)"
_WORDS = {
    "WRONG_VERSION_NUMBER": _NO_TLS,
    "RECORD_LAYER_FAILURE": _NO_TLS,
    "CERTIFICATE_VERIFY_FAILED": "its certificate is not of this cluster's authority",
    "TLSV1_ALERT_UNKNOWN_CA": "it refuses this side's certificate, which is not of its cluster's authority",
    "TLSV1_ALERT_DECRYPT_ERROR": "it refuses this side's certificate, which is not of its cluster's authority",
    "SSLV3_ALERT_BAD_CERTIFICATE": "it refuses this side's certificate",
    "SSLV3_ALERT_CERTIFICATE_EXPIRED": "it refuses this side's certificate, which has expired",
    "TLSV13_ALERT_CERTIFICATE_REQUIRED": "it asks for a certificate, and this side has none",
    "PEER_DID_NOT_RETURN_A_CERTIFICATE": "it shows no certificate",
}
_FAREWELL_S = 1.0
_EXPIRED, _NOT_YET_VALID = 10, 9
"""OpenSSL's verify codes."""


class PlainPeer(ProtocolError):
    """A peer on another host that speaks no TLS where it must."""


def stays_on_host(sock: socket.socket) -> bool:
    """Return whether both ends of the connection have the same address."""
    try:
        return sock.getsockname()[0] == sock.getpeername()[0]
    except OSError:
        return False


async def dial_tls(sock: socket.socket, tls: Tls | None) -> socket.socket:
    """Return the connection that this side has made, encrypted where it leaves the host. Raises ProtocolError."""
    if tls is None or stays_on_host(sock):
        return sock
    return await _shake_hands(sock, tls, dialled=True)


async def accept_tls(sock: socket.socket, tls: Tls | None) -> socket.socket:
    """Return the connection that this side has accepted, encrypted if its peer has begun TLS. Raises ReplicaLost, ProtocolError,
    and PlainPeer where the peer is on another host and speaks no TLS."""
    if tls is None:
        return sock
    if await _first_byte(sock) == _TLS_HANDSHAKE:
        return await _shake_hands(sock, tls, dialled=False)
    if stays_on_host(sock):
        return sock
    raise PlainPeer(f"the peer at {_address(sock)} speaks no TLS, which security.tls asks for here")


async def send_all(sock: socket.socket, data: memoryview) -> None:
    """Raises OSError."""
    if not isinstance(sock, ssl.SSLSocket):
        await asyncio.get_running_loop().sock_sendall(sock, data)
        return
    data = data.cast("B")
    while data.nbytes:
        data = data[await _retried(sock, sock.send, data) :]


async def recv_into(sock: socket.socket, target: memoryview) -> int:
    """Return the number of bytes; 0 at the end of the stream. Raises OSError."""
    if not isinstance(sock, ssl.SSLSocket):
        return await asyncio.get_running_loop().sock_recv_into(sock, target)
    return await _retried(sock, sock.recv_into, target)


async def let_go(sock: socket.socket) -> None:
    """Close a connection whose peer is still to read why. Closing it with unread bytes would drop what was sent last."""
    try:
        with contextlib.suppress(OSError, TimeoutError):
            async with asyncio.timeout(_FAREWELL_S):
                socket.socket.shutdown(sock, socket.SHUT_WR)
                while await _retried(sock, socket.socket.recv, sock, 1 << 16):
                    pass
    finally:
        sock.close()


def in_words(error: ssl.SSLError) -> str:
    """Return what failed in TLS, said of the other side."""
    code = error.verify_code if isinstance(error, ssl.SSLCertVerificationError) else None
    if code == _EXPIRED:
        return "its certificate has expired"
    if code == _NOT_YET_VALID:
        return "its certificate is not valid yet: compare the hosts' clocks"
    reason = error.reason or ""
    return _WORDS.get(reason, f"TLS failed: {reason.lower().replace('_', ' ') or error}")


async def _shake_hands(sock: socket.socket, tls: Tls, *, dialled: bool) -> socket.socket:
    context, peer = tls.context(dialled=dialled), _address(sock)
    made = context.wrap_socket(sock, server_side=not dialled, do_handshake_on_connect=False)
    try:
        await _retried(made, made.do_handshake)
    except ssl.SSLError as error:
        await let_go(made)
        raise ProtocolError(f"no TLS with {peer}: {in_words(error)}") from error
    except BaseException:
        made.close()
        raise
    return made


def _address(sock: socket.socket) -> str:
    try:
        return sock.getpeername()[0]
    except OSError:
        return "an address that has left"


async def _first_byte(sock: socket.socket) -> bytes:
    first = await _retried(sock, sock.recv, 1, socket.MSG_PEEK)
    if not first:
        raise ReplicaLost("the peer closed the connection before it said anything")
    return first


async def _retried(sock: socket.socket, call: Callable[..., R], *args: Any) -> R:
    """Call until it does not have to wait."""
    loop = asyncio.get_running_loop()
    while True:
        try:
            return call(*args)
        except (ssl.SSLWantReadError, BlockingIOError):
            await _ready(sock.fileno(), loop.add_reader, loop.remove_reader)
        except ssl.SSLWantWriteError:
            await _ready(sock.fileno(), loop.add_writer, loop.remove_writer)


async def _ready(descriptor: int, add: Callable[..., Any], remove: Callable[[int], Any]) -> None:
    ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    add(descriptor, lambda: ready.done() or ready.set_result(None))
    try:
        await ready
    finally:
        remove(descriptor)
