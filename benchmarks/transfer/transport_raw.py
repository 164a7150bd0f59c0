"""The raw links that the KV transports are measured against: what the same two processes reach without Baton.

Sockets: blocking threads, one connection each, the largest possible system calls (as iperf does), one acknowledging byte for each
transfer. Memory: one copy into pages that the other process has mapped. NIXL: one read on request of a socket's message."""

import contextlib
import ctypes
import mmap
import os
import select
import socket
import threading
from collections.abc import Generator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from kvtransfer.transport.nixl import load
from kvtransfer.transport.shm import SharedSegment

STREAMS = (1, 2, 4)


def sink(server: socket.socket, pool: memoryview) -> None:
    """Serves `RawSockets`: for each connection `u64 offset, u64 size` and the bytes, then one byte back."""
    while True:
        connection, _ = server.accept()
        threading.Thread(target=_drain, args=(connection, pool), daemon=True).start()


def _drain(connection: socket.socket, pool: memoryview) -> None:
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    while len(head := connection.recv(16, socket.MSG_WAITALL)) == 16:
        at, size = int.from_bytes(head[:8], "little"), int.from_bytes(head[8:], "little")
        while size:
            count = connection.recv_into(pool[at : at + size], 0, socket.MSG_WAITALL)
            at, size = at + count, size - count
        connection.send(b"!")


class RawSockets:
    def __init__(self, address: tuple[str, int], num_streams: int, source: memoryview) -> None:
        self._source = source
        self._sockets = [socket.create_connection(address) for _ in range(num_streams)]
        for connection in self._sockets:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._threads = ThreadPoolExecutor(num_streams)

    def transfer(self, size: int, count: int) -> None:
        """`count` times `size` bytes, one behind the other; returns when the other side has all of them."""
        if len(self._sockets) == 1:
            self._part(self._sockets[0], 0, size, count)
            return
        step = -(-size // len(self._sockets))
        jobs = [
            self._threads.submit(self._part, connection, i * step, min(step, size - i * step), count)
            for i, connection in enumerate(self._sockets)
        ]
        for job in jobs:
            job.result()

    def close(self) -> None:
        self._threads.shutdown()
        for connection in self._sockets:
            connection.close()

    def _part(self, connection: socket.socket, at: int, size: int, count: int) -> None:
        for _ in range(count):
            connection.sendall(at.to_bytes(8, "little") + size.to_bytes(8, "little"))
            connection.sendall(self._source[at : at + size])
        connection.recv(count, socket.MSG_WAITALL)


class RawCopy:
    """memmove into shared memory that the holder has mapped and filled."""

    def __init__(self, path: str, source: memoryview) -> None:
        with Path(path).open("r+b") as file:
            self._target = mmap.mmap(file.fileno(), 0)
        self._to = ctypes.addressof(ctypes.c_char.from_buffer(self._target))
        self._from = ctypes.addressof(ctypes.c_char.from_buffer(source))

    def transfer(self, size: int, count: int) -> None:
        for _ in range(count):
            ctypes.memmove(self._to, self._from, size)


def shared_memory(num_bytes: int) -> tuple[str, mmap.mmap]:
    """Where another process of ours can open it while this one lives. It has no name that could outlive those who mapped it."""
    descriptor = os.memfd_create("baton-bench")
    os.truncate(descriptor, num_bytes)
    mapped = mmap.mmap(descriptor, num_bytes)
    memoryview(mapped)[:] = bytes(1 << 20) * (num_bytes >> 20)
    return f"/proc/{os.getpid()}/fd/{descriptor}", mapped


@contextlib.contextmanager
def gone_with_the_writer(num_bytes: int) -> Generator[SharedSegment]:
    """A holder's pool, which leaves no file behind when the process that measures is killed."""
    with (
        contextlib.closing(SharedSegment(num_bytes)) as segment,
        contextlib.suppress(EOFError, BrokenPipeError),
    ):
        yield segment


def nixl_sink(server: socket.socket, pool: memoryview) -> None:
    """Serves `RawNixl`: its agent's metadata and address first, then `u64 size`, a read, and one byte back."""
    connection, _ = server.accept()
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    agent, address = _agent("raw-holder", pool)
    head = connection.recv(16, socket.MSG_WAITALL)
    remote, size = int.from_bytes(head[:8], "little"), int.from_bytes(head[8:], "little")
    peer = agent.add_remote_agent(connection.recv(size, socket.MSG_WAITALL))
    while len(head := connection.recv(8, socket.MSG_WAITALL)) == 8:
        size = int.from_bytes(head, "little")
        local = agent.get_xfer_descs([(address, size, 0)], "DRAM")
        handle = agent.initialize_xfer("READ", local, agent.get_xfer_descs([(remote, size, 0)], "DRAM"), peer)
        state = agent.transfer(handle)
        while state == "PROC":
            state = agent.check_xfer_state(handle)
        agent.release_xfer_handle(handle)
        connection.send(b"!" if state == "DONE" else b"?")


def _agent(name: str, pool: memoryview) -> tuple[Any, int]:
    api = load()
    agent = api.nixl_agent(name, api.nixl_agent_config(enable_prog_thread=False, backends=["UCX"]))
    address = np.frombuffer(pool, np.uint8).ctypes.data
    agent.register_memory([(address, len(pool), 0, "")], "DRAM")
    return agent, address


class RawNixl:
    def __init__(self, address: tuple[str, int], source: memoryview) -> None:
        self._agent, base = _agent("raw-writer", source)
        metadata = self._agent.get_agent_metadata()
        self._socket = socket.create_connection(address)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket.sendall(base.to_bytes(8, "little") + len(metadata).to_bytes(8, "little") + metadata)

    def transfer(self, size: int, count: int) -> None:
        self._socket.sendall(size.to_bytes(8, "little") * count)
        done = b""
        while len(done) < count:
            if select.select([self._socket], [], [], 20e-6)[0]:
                done += self._socket.recv(count)
            self._agent.get_new_notifs()  # without this side's progress UCX does not even connect
        assert done == b"!" * count

    def close(self) -> None:
        self._socket.close()
