"""What it costs that a rank's memory is on another host, behind a process that serves it.

    python -m benchmarks.transfer.remote_memory [--json FILE]

Real processes on this machine: an instance, the process that serves its memory elsewhere, and a holder; TCP between the last two.
A write takes until the holder has every byte, from the instance's own memory and from remote memory by turns. Predictions: 0.2 ms
for each message there and back, so 0.2 ms more for any write (hidden behind the next layer) and 0.2 ms before a grant is given
away."""

import asyncio
import multiprocessing
import os
import socket
import statistics
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

from benchmarks.report import parser, write
from cluster.instance.remote_memory.memory_messages import MemorySetup
from cluster.instance.remote_memory.memory_server import serve_memory
from cluster.instance.remote_memory.remote_host import RemoteHost, start_memories
from core.config.cluster_config import MailConfig, TransferConfig
from core.kv import KVLayout, KVShard, RankPool
from kvtransfer.transport.base import Sender
from kvtransfer.transport.tcp import TcpSender
from net.channel import Identity

KEY = b"benchmark"
TCP = TransferConfig(transport="tcp")
POOL = RankPool(
    shard=KVShard.whole(KVLayout(num_layers=8, num_kv_heads=4, head_dim=64, block_size=16, dtype="float32")),
    num_blocks=32,
    memory=1,
)
SIZES = {"64 KiB": (64 << 10, 200), "1 MiB": (1 << 20, 100), "4 MiB": (4 << 20, 50)}


class Process:
    """`engine.ranks.rank.Rank`: what serves the memory is a child of this process."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.sock, theirs = socket.socketpair()
        context = multiprocessing.get_context("spawn")
        self._process = context.Process(target=serve_memory, args=(theirs, TCP, KEY), daemon=True)
        self._process.start()
        theirs.close()

    def obituary(self) -> str:
        return f"{self.name} has ended"

    def end(self, patience_s: float = 0.0) -> None:
        self._process.join(patience_s)
        self._process.kill()
        self._process.join()
        self.sock.close()


def started(name: str, receives: bool) -> RemoteHost:
    setup = MemorySetup(
        memory=1, address=name, incarnation="1", receives=receives, host="127.0.0.1", pools=(POOL,)
    )
    (remote,) = start_memories(lambda *_: [Process(name)], [setup], MailConfig(peer_timeout_s=60.0))
    remote.run(lambda *_: None, lambda *_: None)
    return remote


async def measure(most_rounds: int) -> dict[str, dict[str, float]]:
    holder, writer = started("holder", True), started("writer", False)
    (region,), (remote,) = holder.regions(POOL), writer.senders
    source = memoryview(bytearray(POOL.num_bytes))
    own = TcpSender(KEY, Identity("writer", "2", os.getpid()), source, checksum=False)
    found: dict[str, dict[str, float]] = {}
    for name, (num_bytes, rounds) in SIZES.items():
        found[name] = await _by_turns(
            {way: _write(sender, region, num_bytes) for way, sender in (("own", own), ("remote", remote))},
            min(rounds, most_rounds),
        )
    found["a grant is admitted"] = await _by_turns({"remote": lambda: _opened(writer)}, min(300, most_rounds))
    await own.close()
    for host in (holder, writer):
        await host.close()
    return found


def _write(sender: Sender, region: Any, num_bytes: int) -> Callable[[], Awaitable[int]]:
    return lambda: sender.probe(region, num_bytes)


async def _opened(remote: RemoteHost) -> None:
    known = asyncio.Event()
    remote.when_open(known.set)
    await known.wait()


async def _by_turns(calls: dict[str, Callable[[], Awaitable[Any]]], rounds: int) -> dict[str, float]:
    """p50 in ms."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for number in range(rounds + 10):
        for name, call in calls.items():
            begun = time.perf_counter()
            await call()
            if number >= 10:
                times[name].append(time.perf_counter() - begun)
    return {name: 1e3 * statistics.median(each) for name, each in times.items()}


def main() -> None:
    arguments = parser(__doc__).parse_args()
    with suppress(KeyboardInterrupt):
        found = asyncio.run(measure(3 if arguments.smoke else 300))
        for name, times in found.items():
            print(f"{name:20}", *(f"{way} {ms:.3f} ms" for way, ms in times.items()))
        write(arguments.json, "benchmarks.transfer.remote_memory", {"p50 ms": found})


if __name__ == "__main__":
    main()
