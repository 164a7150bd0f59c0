"""Serves HTTP on the running event loop, without uvicorn's own signal handlers, which know nothing of draining."""

import asyncio
import contextlib
import errno
import math
import socket
import ssl
from collections.abc import Sequence

import uvicorn
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from cluster.ingress.http.connection_limits import ConnectionLimits
from cluster.ingress.http.http_acceptor import Acceptor
from cluster.ingress.http.http_connection import Connection

_STOP_S = 5.0
_SOCKET_BYTES = 256 << 10
"""What the kernel may keep of a connection in each direction; it takes twice as much with its own books."""
_LIMITS = ConnectionLimits()


class HttpServer:
    """Serves `app` from `start` to `stop`, on the first of `ports` that is free.

    With `shared`, several processes of this host may listen on one port."""

    def __init__(
        self,
        app: ASGIApp,
        host: str,
        ports: Sequence[int],
        *,
        shared: bool,
        tls: ssl.SSLContext | None = None,
        limits: ConnectionLimits = _LIMITS,
    ) -> None:
        self._closing = _Closing(app)
        config = uvicorn.Config(
            self._closing,
            log_config=None,
            lifespan="off",
            access_log=False,
            ws="none",
            timeout_keep_alive=math.ceil(limits.idle_s),
        )
        self._listener = _first_free(host, ports, shared=shared)
        # What is in the kernel's hands alone has the same time as what waits in this process.
        self._listener.setsockopt(
            socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, math.ceil(limits.send_s * 1000)
        )
        self._config, self._server = config, _Server(config, self._listener, tls, limits)

    @property
    def port(self) -> int:
        """The port that it listens on, which the system chose where 0 was asked for."""
        return self._listener.getsockname()[1]

    @property
    def num_connections(self) -> int:
        return len(self._server.server_state.connections)

    def start(self) -> "asyncio.Task[None]":
        self._task = asyncio.create_task(self._server.serve([self._listener]))
        return self._task

    def retire(self) -> None:
        """Make every answer from now on the last one on its connection, so that clients come back to another ingress."""
        self._closing.on = True

    async def stop(self, timeout_s: float = _STOP_S) -> None:
        """Accept nothing more and close what is idle. Answers that are being written get `timeout_s`."""
        self._config.timeout_graceful_shutdown = math.ceil(timeout_s)
        self._server.should_exit = True
        await self._task


class _Server(uvicorn.Server):
    """uvicorn's server, with an acceptor of its own."""

    def __init__(
        self,
        config: uvicorn.Config,
        listener: socket.socket,
        tls: ssl.SSLContext | None,
        limits: ConnectionLimits,
    ) -> None:
        super().__init__(config)

        def make() -> Connection:
            return Connection(config, self.server_state, {}, limits)

        self._acceptor = Acceptor(listener, make, tls, limits)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        self.servers = []
        self._acceptor.start()
        self.started = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._acceptor.accept_no_more()
        await super().shutdown(sockets)
        await self._acceptor.close()

    @contextlib.contextmanager
    def capture_signals(self):
        yield


class _Closing:
    """Adds `Connection: close` to the answer of every request that comes once it is `on`."""

    def __init__(self, app: ASGIApp) -> None:
        self._app, self.on = app, False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def closing(message: Message) -> None:
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message.get("headers", ()), (b"connection", b"close")]}
            await send(message)

        await self._app(scope, receive, closing if self.on else send)


def _first_free(host: str, ports: Sequence[int], *, shared: bool) -> socket.socket:
    """Return a socket on the first free port. Raises OSError when none is."""
    for port in ports[:-1]:
        try:
            return _listen(host, port, shared=shared)
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
    return _listen(host, ports[-1], shared=shared)


def _listen(host: str, port: int, *, shared: bool) -> socket.socket:
    """Listen. asyncio turns Nagle's algorithm off only for sockets that name their protocol; with it the first token waits 40
    ms."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
            listener.setsockopt(socket.SOL_SOCKET, option, _SOCKET_BYTES)
        if shared:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        listener.bind((host, port))
        listener.listen(2048)
    except OSError:
        listener.close()
        raise
    return listener
