"""Chaos nodes (`tests/chaos/node.py`), forked: the matrix starts one for nearly every case."""

import asyncio
import ctypes
import json
import os
import socket
import sys
from pathlib import Path
from typing import Any

from tests.forked import FORKED

_CLONE_NEWNET = 0x40000000


class ForkedNode:
    def __init__(self, spec: dict[str, Any], log: Path) -> None:
        self._sock, theirs = socket.socketpair()
        self._process = FORKED.Process(target=_serve, args=(theirs, json.dumps(spec), log))
        self._process.start()
        theirs.close()
        self._writer: asyncio.StreamWriter | None = None

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    @property
    def is_alive(self) -> bool:
        return self._process.exitcode is None

    async def connect(self) -> asyncio.StreamReader:
        """Return what the node writes to its standard output."""
        reader, self._writer = await asyncio.open_connection(sock=self._sock)
        return reader

    def write(self, line: bytes) -> None:
        assert self._writer is not None
        self._writer.write(line)

    def end_input(self) -> None:
        if self._writer is not None and self._writer.can_write_eof() and not self._writer.is_closing():
            self._writer.write_eof()

    def signal(self, number: int) -> None:
        if self.is_alive:
            os.kill(self.pid, number)

    async def wait(self) -> None:
        """Wait until the process has ended."""
        loop = asyncio.get_running_loop()
        ended = loop.create_future()
        loop.add_reader(self._process.sentinel, lambda: ended.done() or ended.set_result(None))
        try:
            await ended
        finally:
            loop.remove_reader(self._process.sentinel)
        self._process.join()

    def close(self) -> None:
        """Give the connection back."""
        if self._writer is not None:
            self._writer.close()


def _serve(sock: socket.socket, spec: str, log: Path) -> None:
    with log.open("ab") as errors:
        os.dup2(errors.fileno(), 2)
    for number in (0, 1):
        os.dup2(sock.fileno(), number)
    sock.close()
    if netns := json.loads(spec).get("netns"):
        _enter(netns)
    sys.stdin, sys.stdout = os.fdopen(0, "rb"), os.fdopen(1, "w")
    from tests.chaos import node

    node.main(spec)


def _enter(netns: str) -> None:
    """Have all sockets of this process belong to the network namespace."""
    libc = ctypes.CDLL(None, use_errno=True)
    with open(netns, "rb") as file:
        if libc.setns(file.fileno(), _CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"cannot enter {netns}")
