"""KV transports against what the machine gives: bandwidth by message size, and the latency of 4 KiB.

    python -m benchmarks.transport [--json FILE]

Shared memory is compared with a plain copy between two mappings in one process, TCP with a raw blocking socket between the same
two processes. Medians of interleaved rounds. Prediction: shared memory 95 % of the copy from 1 MiB on, TCP 80 % of the socket."""

import argparse
import asyncio
import json
import mmap
import multiprocessing
import os
import socket
import statistics
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from baton.bench.report import machine
from core.kv import KVLayout, KVShard
from core.messages import RegionKey
from kvtransfer.copies import CopyRun
from kvtransfer.transport.shm import SharedSegment, ShmReceiver, ShmSender
from kvtransfer.transport.tcp import TcpReceiver, TcpSender
from net.channel import Identity

POOL_BYTES = 64 << 20
SIZES = [4 << 10, 64 << 10, 1 << 20, 4 << 20, 16 << 20, 64 << 20]
SHARD = KVShard.whole(KVLayout(1, 1, 1024, 16, "float32"))
KEY = b"benchmark"


def holder(pipe: Any) -> None:
    """The decode side: receives TCP frames and raw bytes, and acknowledges each over the pipe's connection."""

    async def main() -> None:
        segment = SharedSegment(POOL_BYTES)
        arrived = asyncio.Queue[int]()
        me = Identity("holder", "h", os.getpid())
        tcp = TcpReceiver(
            KEY,
            me,
            "127.0.0.1",
            segment.buffer,
            lambda *_: True,
            lambda _, n: arrived.put_nowait(n),
            lambda _: None,
        )
        raw = socket.create_server(("127.0.0.1", 0))
        threading.Thread(target=sink, args=(raw, segment.buffer), daemon=True).start()
        blocks = POOL_BYTES // SHARD.block_bytes
        shm = ShmReceiver(segment)
        pipe.send((shm.region(SHARD, blocks), tcp.region(SHARD, blocks), raw.getsockname()))
        while (wanted := await asyncio.to_thread(pipe.recv)) is not None:
            while wanted > 0:
                wanted -= await arrived.get()
            pipe.send("arrived")
        await tcp.close()
        segment.close()

    asyncio.run(main())


def sink(server: socket.socket, pool: memoryview) -> None:
    """Raw side: size, then that many bytes into the pool, then one byte back."""
    connection, _ = server.accept()
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    while len(head := connection.recv(8, socket.MSG_WAITALL)) == 8:
        left = int.from_bytes(head, "little")
        while left:
            left -= connection.recv_into(pool[:left])
        connection.send(b"!")


class Ways:
    """Each measured way writes `size` bytes and returns when they are in the holder's pool."""

    def __init__(self, pipe: Any, shm: RegionKey, tcp: RegionKey, raw: tuple[str, int]) -> None:
        self.pipe, self.shm, self.tcp = pipe, shm, tcp
        self.source = memoryview(mmap.mmap(-1, POOL_BYTES))
        self.source[:] = os.urandom(1 << 20) * (POOL_BYTES >> 20)
        self.other = memoryview(mmap.mmap(-1, POOL_BYTES))
        self.shm_sender = ShmSender(self.source)
        self.tcp_sender = TcpSender(KEY, Identity("writer", "w", os.getpid()), self.source, checksum=False)
        self.socket = socket.create_connection(raw)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    async def copy(self, size: int) -> None:
        self.other[:size] = self.source[:size]

    async def shared_memory(self, size: int) -> None:
        await self.shm_sender.write("g", self.shm, [CopyRun(0, 0, size)])

    async def raw_socket(self, size: int) -> None:
        self.socket.sendall(size.to_bytes(8, "little"))
        self.socket.sendall(self.source[:size])
        self.socket.recv(1)

    async def tcp_transport(self, size: int) -> None:
        self.pipe.send(size)
        await self.tcp_sender.write("g", self.tcp, [CopyRun(0, 0, size)])
        self.pipe.recv()


async def measure(ways: Ways, rounds: int) -> dict[str, dict[str, float]]:
    calls: dict[str, Callable[[int], Any]] = {
        "copy": ways.copy,
        "shm": ways.shared_memory,
        "socket": ways.raw_socket,
        "tcp": ways.tcp_transport,
    }
    results: dict[str, dict[str, float]] = {}
    for size in SIZES:
        times: dict[str, list[float]] = {name: [] for name in calls}
        for number in range(rounds + 2):
            for name, call in calls.items():
                started = time.perf_counter()
                await call(size)
                if number >= 2:
                    times[name].append(time.perf_counter() - started)
        medians = {name: statistics.median(values) for name, values in times.items()}
        row = {f"{name}_us": seconds * 1e6 for name, seconds in medians.items()}
        row |= {f"{name}_gb_s": size / seconds / 1e9 for name, seconds in medians.items()}
        row |= {
            "shm_of_copy": medians["copy"] / medians["shm"],
            "tcp_of_socket": medians["socket"] / medians["tcp"],
        }
        results[f"{size >> 10} KiB"] = row
        print(
            f"{size >> 10:6d} KiB  " + "  ".join(f"{key} {value:.2f}" for key, value in row.items()),
            flush=True,
        )
    await ways.tcp_sender.close()
    return results


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path)
    parser.add_argument("--rounds", type=int, default=30)
    args = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=holder, args=(theirs,), daemon=True)
    process.start()
    ways = Ways(ours, *ours.recv())
    results = asyncio.run(measure(ways, args.rounds))
    ours.send(None)
    process.join(10)
    if args.json:
        content = {"command": "python -m benchmarks.transport", "machine": machine(), "results": results}
        args.json.write_text(json.dumps(content, indent=2) + "\n")


if __name__ == "__main__":
    main()
