"""KV transports against the raw link between the same two processes, in the same run: bandwidth by size, latency of 4 KiB.

    python -m benchmarks.transfer.transport [--json FILE] [--rounds N] [--only shm,tcp]

Bandwidth is that of a burst of 32 MiB (at least one transfer), two transfers under way at once as a prefill instance sends
layers, until the holder's ledger has counted all of it and the writer knows; latency is that of 4 KiB alone. Rounds are
interleaved. `of_raw`: the transport's bandwidth by that of the raw link (for sockets whichever of 1, 2 and 4 connections has the
best median), by medians and, `of_raw_best`, by the best rounds, which other work on the machine disturbs less.
Predictions are in PREDICTIONS, written before the first run."""

import asyncio
import mmap
import multiprocessing
import os
import socket
import statistics
import threading
import time
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import uvloop

from benchmarks.report import parser, write
from benchmarks.transfer.transport_raw import (
    STREAMS,
    RawCopy,
    RawNixl,
    RawSockets,
    gone_with_the_writer,
    nixl_sink,
    shared_memory,
    sink,
)
from core.kv import KVLayout, KVShard
from core.messages import RegionKey
from kvtransfer.copies import CopyRun
from kvtransfer.pusher import MAX_WRITES
from kvtransfer.transport.base import Sender
from kvtransfer.transport.nixl import NixlMedium, RegisteredMemory, available
from kvtransfer.transport.pull import Medium, PullReceiver, PullSender
from kvtransfer.transport.shm import SharedSegment, ShmReceiver, ShmSender
from kvtransfer.transport.tcp import TcpReceiver, TcpSender
from kvtransfer.transport.write_admission import WriteAdmission
from net.channel import Identity

PREDICTIONS = {
    "shm": "one numpy copy each way: >= 95 % of memmove from 1 MiB on; 4 KiB within 2 us of it",
    "tcp": "the same system calls as raw: 90-100 % of the best raw socket from 4 MiB on; 60 % at 1 MiB; "
    "4 KiB: one thread wake-up and one loop turn more than raw, 40 us + 50 us",
    "nixl": "the same read, and 0.2 ms of messages and thread switches: 90 % of raw from 16 MiB on, 60 % at 4 MiB",
}
POOL_BYTES = 256 << 20
BURST_BYTES = 32 << 20
SIZES = [64 << 10, 1 << 20, 4 << 20, 16 << 20, 64 << 20, 256 << 20]
SMOKE_SIZES = [4 << 20, 16 << 20]
SHARD = KVShard.whole(KVLayout(num_layers=1, num_kv_heads=1, head_dim=1024, block_size=16, dtype="float32"))
KEY = b"benchmark"
Transfer = Callable[[int, int], Awaitable[None]]
"""(bytes, how many times)"""


class Counter:
    """The holder's ledger: answers one byte once as many bytes have arrived as the writer announced."""

    def __init__(self, wanted: memoryview, back: socket.socket) -> None:
        self._wanted, self._back, self._have = wanted, back, 0

    def arrived(self, _: str, num_bytes: int) -> None:
        self._have += num_bytes
        if self._have == self._wanted[0]:
            self._have = 0
            self._back.send(b"!")


def holder(pipe: Any, back: socket.socket, wanted_path: str) -> None:
    """The decode side."""
    with Path(wanted_path).open("r+b") as file:
        wanted = mmap.mmap(file.fileno(), 8)

    torch.set_num_threads(1)

    async def main(segment: SharedSegment) -> None:
        counter = Counter(memoryview(wanted).cast("Q"), back)
        admission = WriteAdmission(lambda *_: True, counter.arrived, lambda _: None)
        tcp = TcpReceiver(KEY, Identity("holder", "h", os.getpid()), "127.0.0.1", segment.buffer, admission)
        raw = socket.create_server(("127.0.0.1", 0))
        threading.Thread(target=sink, args=(raw, segment.buffer), daemon=True).start()
        path, _ = shared_memory(POOL_BYTES)
        blocks = POOL_BYTES // SHARD.block_bytes
        pulled = [
            PullReceiver(KEY, Identity("holder", "h", os.getpid()), "127.0.0.1", medium, admission)
            for medium in media(segment.buffer)
        ]
        raw_nixl = socket.create_server(("127.0.0.1", 0))
        if available():
            threading.Thread(target=nixl_sink, args=(raw_nixl, segment.buffer), daemon=True).start()
        regions = [each.region(SHARD, blocks) for each in (ShmReceiver(segment), tcp, *pulled)]
        pipe.send((regions, raw.getsockname(), raw_nixl.getsockname(), path))
        await asyncio.to_thread(pipe.recv)
        await tcp.close()
        for receiver in pulled:
            await receiver.close()

    with (
        gone_with_the_writer(POOL_BYTES) as segment,
        asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner,
    ):
        runner.run(main(segment))


def media(pool: memoryview) -> list[Medium]:
    return [NixlMedium(RegisteredMemory.of(pool))] if available() else []


class Ways:
    """Each measured way writes `size` bytes and returns when they are in the holder's pool and acknowledged."""

    def __init__(
        self,
        regions: list[RegionKey],
        raw: tuple[str, int],
        raw_nixl: tuple[str, int],
        path: str,
        wanted: memoryview,
        back: socket.socket,
    ) -> None:
        self._wanted, self._back = wanted, back
        self.source = memoryview(mmap.mmap(-1, POOL_BYTES))
        self.source[:] = os.urandom(1 << 20) * (POOL_BYTES >> 20)
        me = Identity("writer", "w", os.getpid())
        self.senders: list[Sender] = [
            ShmSender(self.source),
            TcpSender(KEY, me, self.source, checksum=False),
            *(PullSender(KEY, me, medium, checksum=False) for medium in media(self.source)),
        ]
        copy = RawCopy(path, self.source)
        self.calls: dict[str, Transfer] = {"raw_copy": _at_once(copy.transfer)}
        links: dict[str, RawSockets | RawNixl] = {
            f"raw_socket_{count}": RawSockets(raw, count, self.source) for count in STREAMS
        }
        if available():
            links["raw_nixl"] = RawNixl(raw_nixl, self.source)
        self.calls |= {name: _at_once(link.transfer) for name, link in links.items()}
        self.links = [*links.values()]
        for sender in self.senders:
            (region,) = (region for region in regions if sender.reaches(region))
            self.calls[sender.name] = self._through(sender, region)
        self.measured = self.calls

    def _through(self, sender: Sender, region: RegionKey) -> Transfer:
        async def transfer(size: int, count: int) -> None:
            self._wanted[0] = size * count
            under_way: deque[asyncio.Task[None]] = deque()
            for _ in range(count):
                if len(under_way) == MAX_WRITES:
                    await under_way.popleft()
                under_way.append(asyncio.create_task(sender.write("g", region, [CopyRun(0, 0, size)])))
            for task in under_way:
                await task
            if not sender.vouches:
                self._back.recv(1)

        return transfer


def _at_once(call: Callable[[int, int], None]) -> Transfer:
    async def transfer(size: int, count: int) -> None:
        call(size, count)

    return transfer


RAW_OF = {
    "shm": ["raw_copy"],
    "tcp": [f"raw_socket_{count}" for count in STREAMS],
    "nixl": ["raw_nixl"],
}


async def measure(ways: Ways, sizes: Sequence[int], rounds: int) -> dict[str, dict[str, float]]:
    results: dict[str, dict[str, float]] = {}
    for size, burst in [(4 << 10, 1), *((size, max(1, BURST_BYTES // size)) for size in sizes)]:
        times: dict[str, list[float]] = {name: [] for name in ways.measured}
        for number in range(min(rounds, max(9, rounds * (64 << 20) // size)) + 2):
            for name, call in ways.measured.items():
                started = time.perf_counter()
                await call(size, burst)
                if number >= 2:
                    times[name].append((time.perf_counter() - started) / burst)
        row = _row(times, size)
        results[f"{size >> 10} KiB" + (" alone" if burst == 1 and size < BURST_BYTES else "")] = row
        unit = "_us" if size == 4 << 10 else "_gb_s"
        shown = {key: value for key, value in row.items() if key.endswith(unit) or "_of_raw" in key}
        print(
            f"{size >> 10:6d} KiB  " + "  ".join(f"{key} {value:.2f}" for key, value in shown.items()),
            flush=True,
        )
    for sender in ways.senders:
        await sender.close()
    for link in ways.links:
        link.close()
    return results


def _row(times: dict[str, list[float]], size: int) -> dict[str, float]:
    medians = {name: statistics.median(values) for name, values in times.items()}
    row = {f"{name}_us": seconds * 1e6 for name, seconds in medians.items()}
    row |= {f"{name}_gb_s": size / seconds / 1e9 for name, seconds in medians.items()}
    for name, raws in RAW_OF.items():
        if name in medians:
            raw = min((raw for raw in raws if raw in medians), key=medians.__getitem__)
            row[f"{name}_of_raw"] = medians[raw] / medians[name]
            row[f"{name}_of_raw_best"] = min(times[raw]) / min(times[name])
    return row


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--rounds", type=int, default=40)
    options.add_argument("--only", default="", help="transports, by name; empty: all")
    args = options.parse_args()
    torch.set_num_threads(1)
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    back, their_back = socket.socketpair()
    path, wanted = shared_memory(1 << 20)
    process = context.Process(target=holder, args=(theirs, their_back, path), daemon=True)
    process.start()
    regions, raw, raw_nixl, raw_path = ours.recv()
    ways = Ways(regions, raw, raw_nixl, raw_path, memoryview(wanted).cast("Q"), back)
    if args.only:
        chosen = args.only.split(",")
        kept = {*chosen, *(raw for name in chosen for raw in RAW_OF.get(name, []))}
        ways.measured = {name: call for name, call in ways.calls.items() if name in kept}
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        results = runner.run(measure(ways, *((SMOKE_SIZES, 1) if args.smoke else (SIZES, args.rounds))))
    ours.send(None)
    process.join(10)
    for end in (back, their_back):
        end.close()
    write(args.json, "benchmarks.transfer.transport", {"predictions": PREDICTIONS, "results": results})


if __name__ == "__main__":
    main()
