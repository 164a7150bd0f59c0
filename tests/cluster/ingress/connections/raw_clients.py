"""Clients that write bytes of their own to an ingress, over real sockets."""

import asyncio
import contextlib
import socket
import ssl
from collections.abc import AsyncGenerator
from typing import Any

from cluster.ingress.http.connection_limits import ConnectionLimits
from cluster.ingress.http.http_server import HttpServer
from tests.cluster.ingress.api.fakes import FakeGenerator
from tests.cluster.ingress.api.harness import Api
from tests.patience import PATIENCE_S

GET = b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"
CHUNKED = (
    b"POST %s HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n"
)


@contextlib.asynccontextmanager
async def serving(app: Any = None, tls: ssl.SSLContext | None = None, **limits: Any) -> AsyncGenerator[int]:
    """Yield the port of a server."""
    server = HttpServer(
        app or Api(FakeGenerator()).app,
        "127.0.0.1",
        [0],
        shared=False,
        tls=tls,
        limits=ConnectionLimits(**limits),
    )
    server.start()
    try:
        yield server.port
    finally:
        await server.stop()


class Client:
    def __init__(self, sock: socket.socket) -> None:
        self._sock, self._loop = sock, asyncio.get_running_loop()

    @classmethod
    async def connect(cls, port: int, address: str = "127.0.0.1", read_bytes: int = 0) -> "Client":
        """Connect from a loopback address. `read_bytes` is what the kernel may keep for it unread."""
        sock = socket.socket()
        if read_bytes:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, read_bytes)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 65536)  # what is sent is soon at the server
        sock.bind((address, 0))
        sock.setblocking(False)
        with contextlib.suppress(ConnectionError):  # the server may have made room by this very connection
            await asyncio.get_running_loop().sock_connect(sock, ("127.0.0.1", port))
        return cls(sock)

    async def send(self, data: bytes) -> None:
        async with asyncio.timeout(PATIENCE_S):
            await self._loop.sock_sendall(self._sock, data)

    async def send_until_cut(self, piece: bytes, most: int, patience_s: float = PATIENCE_S) -> int:
        """Send again and again, until nothing is taken for `patience_s`. Return the bytes that were taken, `most` at the most."""
        taken = 0
        with contextlib.suppress(ConnectionError, TimeoutError):
            while taken < most:
                async with asyncio.timeout(patience_s):
                    await self._loop.sock_sendall(self._sock, piece)
                taken += len(piece)
                await asyncio.sleep(0)
        return taken

    async def read(self, wanted: bytes) -> bytes:
        """Return what comes, up to and with `wanted`."""
        data = b""
        async with asyncio.timeout(PATIENCE_S):
            while wanted not in data:
                piece = await self._loop.sock_recv(self._sock, 1 << 16)
                assert piece, f"the connection ended after {data!r}"
                data += piece
        return data

    async def take(self, most: int) -> int:
        """Read what is there. Return how many bytes that was."""
        async with asyncio.timeout(PATIENCE_S):
            return len(await self._loop.sock_recv(self._sock, most))

    async def ended(self) -> bytes:
        """Wait until the server has ended the connection. Return what it had sent."""
        data = b""
        async with asyncio.timeout(PATIENCE_S):
            with contextlib.suppress(ConnectionError):
                while piece := await self._loop.sock_recv(self._sock, 1 << 16):
                    data += piece
        return data

    def close(self) -> None:
        self._sock.close()
