"""What TLS between hosts costs: of KV over TCP, and of mail.

    python -m benchmarks.transfer.encryption [--json FILE]

Two processes on this machine, plain and encrypted in turn: the other one listens at an address that is taken for another host's.
KV: 16 MiB, two at once as a prefill instance sends layers, received and dropped; the best rate, and the processor time of both
processes. Mail: small messages, one in each turn of the event loop, which the other process returns; the processor time of both
processes for each of them, there and back, and how long one alone takes.
Predictions, before the first run: AES-256-GCM takes 0.5 s of a core's time for each GB and side, so KV at a third to a half of
the plain rate on one machine, where both sides share its cores; 10 us for a message there and back."""

import asyncio
import multiprocessing
import os
import resource
import statistics
import time
from contextlib import suppress
from typing import Any

import uvloop

from benchmarks.report import parser, write
from core.kv import KVLayout, KVShard
from core.messages import Cancel, Message, RegionKey
from kvtransfer.transport.tcp import TcpReceiver, TcpSender
from kvtransfer.transport.write_admission import WriteAdmission
from net.mail import TcpMail
from net.tls import SecretTls

KEY = b"benchmark"
WAYS = {"plain": None, "TLS": SecretTls(KEY)}
HOST = "127.0.0.2"
SHARD = KVShard.whole(KVLayout(num_layers=1, num_kv_heads=1, head_dim=1024, block_size=16, dtype="float32"))
WRITE_BYTES = 16 << 20


def other(pipe: Any, way: str) -> None:
    """Hold a pool, and return mail. Answers each word with the processor time so far."""

    async def main() -> None:
        mail = TcpMail(KEY, HOST, tls=WAYS[way])
        mail.listen(mail.send, lambda _: None)
        pool = memoryview(bytearray(WRITE_BYTES))
        admission = WriteAdmission(lambda *_: True, lambda *_: None, lambda _: None)
        receiver = TcpReceiver(KEY, mail.me, HOST, pool, admission, WAYS[way])
        pipe.send((mail.address, receiver.region(SHARD, WRITE_BYTES // SHARD.block_bytes)))
        while await asyncio.to_thread(pipe.recv):
            pipe.send(_processor_s())
        await receiver.close()
        await mail.close()

    uvloop.run(main())


def _processor_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


class Pair:
    """This process and the other one."""

    def __init__(self, way: str) -> None:
        self._pipe, theirs = multiprocessing.Pipe()
        context = multiprocessing.get_context("spawn")
        self._process = context.Process(target=other, args=(theirs, way), daemon=True)
        self._process.start()
        self._address, self._region = self._pipe.recv()
        self._mail = TcpMail(KEY, HOST, tls=WAYS[way])
        self._mail.listen(self._on_message, lambda _: None)
        self._num_left, self._all_here = 0, asyncio.Event()
        self._sender = TcpSender(
            KEY, self._mail.me, memoryview(os.urandom(WRITE_BYTES)), WAYS[way], checksum=False
        )

    def processor_s(self) -> float:
        self._pipe.send("time")
        return _processor_s() + self._pipe.recv()

    async def kv(self, num_writes: int) -> tuple[float, float]:
        """Return bytes per second, and seconds of processors per GB."""
        region: RegionKey = self._region
        await self._sender.probe(region, WRITE_BYTES)
        begun, used = time.perf_counter(), self.processor_s()
        for _ in range(num_writes):
            await asyncio.gather(*(self._sender.probe(region, WRITE_BYTES) for _ in range(2)))
        num_bytes = 2 * num_writes * WRITE_BYTES
        rate = num_bytes / (time.perf_counter() - begun)
        return rate, (self.processor_s() - used) / num_bytes * 1e9

    async def mail(self, num_messages: int) -> tuple[float, float]:
        """Return the seconds that a message alone takes there and back, and the seconds of processors for one of many."""
        alone: list[float] = []
        for _ in range(num_messages // 10 + 1):
            begun = time.perf_counter()
            await self._echo(1)
            alone.append(time.perf_counter() - begun)
        used = self.processor_s()
        await self._echo(num_messages)
        return statistics.median(alone), (self.processor_s() - used) / num_messages

    async def _echo(self, count: int) -> None:
        self._num_left = count
        self._all_here.clear()
        for number in range(count):
            self._mail.send(self._address, Cancel("request", number))
            await asyncio.sleep(0)
        await self._all_here.wait()

    def _on_message(self, _: str, __: Message) -> None:
        self._num_left -= 1
        if not self._num_left:
            self._all_here.set()

    async def close(self) -> None:
        await self._sender.close()
        await self._mail.close()
        self._pipe.send("")
        self._process.join()


async def measure(num_rounds: int, num_writes: int, num_messages: int) -> dict[str, dict[str, float]]:
    pairs = {way: Pair(way) for way in WAYS}
    kv: dict[str, list[tuple[float, float]]] = {way: [] for way in WAYS}
    mail: dict[str, list[tuple[float, float]]] = {way: [] for way in WAYS}
    for _ in range(num_rounds):
        for way, pair in pairs.items():
            kv[way].append(await pair.kv(num_writes))
            mail[way].append(await pair.mail(num_messages))
    for pair in pairs.values():
        await pair.close()
    return {
        way: {
            "KV, best GB per s": max(rate for rate, _ in kv[way]) / 1e9,
            "KV, processor s per GB": min(used for _, used in kv[way]),
            "a message there and back alone, us": 1e6 * min(alone for alone, _ in mail[way]),
            "a message there and back, processor us": 1e6 * min(used for _, used in mail[way]),
        }
        for way in WAYS
    }


def main() -> None:
    arguments = parser(__doc__).parse_args()
    with suppress(KeyboardInterrupt):
        found = uvloop.run(measure(1, 1, 20) if arguments.smoke else measure(8, 16, 3000))
        for way, figures in found.items():
            print(f"{way:6}", "   ".join(f"{name}: {figure:.3f}" for name, figure in figures.items()))
        write(arguments.json, "benchmarks.transfer.encryption", found)


if __name__ == "__main__":
    main()
