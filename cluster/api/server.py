"""HTTP on the running event loop, without uvicorn's own signal handlers, which know nothing of draining."""

import asyncio
import contextlib
import socket

import uvicorn
from fastapi import FastAPI

_KEEP_ALIVE_S = 75
_STOP_S = 5


class HttpServer:
    """Serves `app` from `start` to `stop`. With `shared`, several processes of this host may listen on one port."""

    def __init__(self, app: FastAPI, host: str, port: int, *, shared: bool) -> None:
        config = uvicorn.Config(
            app,
            log_level="warning",
            lifespan="off",
            access_log=False,
            timeout_keep_alive=_KEEP_ALIVE_S,
            timeout_graceful_shutdown=_STOP_S,
        )
        self._server = _Server(config)
        self._listener = _listen(host, port, shared)

    def start(self) -> "asyncio.Task[None]":
        self._task = asyncio.create_task(self._server.serve([self._listener]))
        return self._task

    async def stop(self) -> None:
        """Accept nothing more and close what is idle; answers that are being written get a few seconds."""
        self._server.should_exit = True
        await self._task


class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self):
        yield


def _listen(host: str, port: int, shared: bool) -> socket.socket:
    """asyncio turns Nagle's algorithm off only for sockets that name their protocol; with it the first token waits 40 ms."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if shared:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    listener.bind((host, port))
    listener.listen(2048)
    return listener
