"""One rank of the KV check, as a process of its own (`rank_job.py`): KV goes from every rank to every other by each transport
that reaches it, as instances hand it over, and is timed until it is in the other's pool.

One link at a time. What is written is a burst of messages, two under way at once, each into blocks of its own, in another order
than they have in the writer's pool."""

import asyncio
import json
import logging
import os
import shutil
import sys
import time
from collections import Counter, deque
from collections.abc import Sequence
from datetime import timedelta

import torch
import uvloop
from torch.distributed import DistStoreError, TCPStore  # pyright: ignore[reportPrivateImportUsage]

from cluster.instance.device_access import device_access, take_device_memory
from cluster.instance.pool_access import PoolAccess, remote_access
from cluster.instance.pull_media import device_media
from cluster.preflight.rank_job import RankJob, another_connection, exchange, meet, read_job
from core.errors import BatonError
from core.kv import KVLayout, KVShard
from core.messages import RegionKey
from device.cuda import CudaDevice
from kvtransfer.copies import CopyRun
from kvtransfer.pusher import MAX_WRITES
from kvtransfer.source import HostSource, Source
from kvtransfer.transport.base import Sender
from net.channel import Identity
from net.codec import decode_one_of, encode

SHARD = KVShard.whole(KVLayout(num_layers=1, num_kv_heads=8, head_dim=128, block_size=16, dtype="float16"))
_WRITES = 4
"""The number of messages in a burst, which do not overlap: what is written twice at once is nobody's KV."""
_BURSTS = 3
"""The number of bursts. The first one also connects, and is not counted."""
_BURST_S = 30.0
_SHARE_OF_SHARED_MEMORY = 4
_Failures = dict[str, str]


class Ledger:
    """kvtransfer.transport.base.Holder: everything may be written. Says by the store when all bytes of a burst are there."""

    def __init__(self, store: TCPStore, pool_bytes: int, burst_bytes: int) -> None:
        self._store, self._pool_bytes, self._burst_bytes = store, pool_bytes, burst_bytes
        self._num_arrived = Counter[str]()

    def may_write(self, grant_id: str, first: int, end: int) -> bool:
        return 0 <= first <= end <= self._pool_bytes

    def arrived(self, grant_id: str, num_bytes: int) -> None:
        self._num_arrived[grant_id] += num_bytes
        if self._num_arrived[grant_id] == self._burst_bytes:
            self._store.set(f"arrived/{grant_id}", "")

    def corrupted(self, grant_id: str) -> None:
        """Do nothing: what does not arrive is missed in the end."""


class Writer:
    """Writes bursts from this rank's pool."""

    def __init__(self, store: TCPStore, source: Source, messages: Sequence[Sequence[CopyRun]]) -> None:
        self._source, self._messages = source, messages
        self._arrivals = another_connection(store)
        self._arrivals.set_timeout(timedelta(seconds=_BURST_S))
        self._num_bytes = sum(run.num_bytes for message in messages for run in message)

    async def best(self, sender: Sender, region: RegionKey, link: str) -> float:
        """Return bytes per second. Raises BatonError, TimeoutError, and DistStoreError where bytes do not arrive."""
        best_s = float("inf")
        for number in range(_BURSTS):
            started = time.perf_counter()
            async with asyncio.timeout(_BURST_S):
                await self._burst(sender, region, f"{link}/{sender.name}/{number}")
            if number:
                best_s = min(best_s, time.perf_counter() - started)
        return self._num_bytes / best_s

    async def _burst(self, sender: Sender, region: RegionKey, grant_id: str) -> None:
        under_way: deque[asyncio.Task[None]] = deque()
        async with asyncio.TaskGroup() as group:
            for message in self._messages:
                if len(under_way) == MAX_WRITES:
                    await under_way.popleft()
                under_way.append(group.create_task(self._source.write(sender, grant_id, region, message, ())))
        if not sender.vouches:
            await asyncio.to_thread(self._arrivals.get, f"arrived/{grant_id}")
        sender.ended(grant_id)


async def measure(job: RankJob, store: TCPStore, access: PoolAccess, num_bytes: int) -> dict[str, object]:
    """Measure. `ways` are this rank's bytes per second by transport, of each receiver; `failures` say why a transport did not
    work. `access` reaches a pool of `num_bytes`."""
    num_blocks = num_bytes // SHARD.block_bytes
    messages = messages_of(num_blocks)
    ledger = Ledger(
        another_connection(store), num_bytes, sum(run.num_bytes for message in messages for run in message)
    )
    receivers, senders = access.make_receivers(ledger), access.make_senders()
    source = access.source or HostSource()
    own = [encode(receiver.region(SHARD, num_blocks)).hex() for receiver in receivers]
    told = await asyncio.to_thread(exchange, store, job, "regions", json.dumps(own))
    regions = [[_region(text) for text in json.loads(each)] for each in told]
    writer = Writer(store, source, messages)
    ways: dict[int, dict[str, float]] = {}
    failures: dict[int, _Failures] = {}
    for one in range(job.world):
        for other in range(job.world):
            if one == other:
                continue
            if one == job.rank:
                ways[other], failures[other] = await _by_each(
                    writer, senders, regions[other], f"{one}-{other}"
                )
                store.set(f"done/{one}-{other}", "")
            else:
                await asyncio.to_thread(store.get, f"done/{one}-{other}")
    await asyncio.to_thread(exchange, store, job, "over", "")  # nobody's pool goes before
    for end in (*senders, *receivers, source):
        await end.close()
    return {"rank": job.rank, "ways": ways, "failures": failures}


async def _by_each(
    writer: Writer, senders: Sequence[Sender], regions: Sequence[RegionKey], link: str
) -> tuple[dict[str, float], _Failures]:
    ways: dict[str, float] = {}
    failures: _Failures = {}
    for sender, region in [(s, r) for s in senders for r in regions if s.reaches(r)]:
        try:
            ways[sender.name] = await writer.best(sender, region, link)
        except* (BatonError, TimeoutError, DistStoreError) as group:
            failures[sender.name] = str(group.exceptions[0]) or type(group.exceptions[0]).__name__
    return ways, failures


def messages_of(num_blocks: int) -> list[list[CopyRun]]:
    """Return the copies of a burst: all blocks of a pool, which lie in the reverse order in the other one."""
    size = SHARD.block_bytes
    runs = [CopyRun(block * size, (num_blocks - 1 - block) * size, size) for block in range(num_blocks)]
    return [runs[first::_WRITES] for first in range(_WRITES)]


def open_pool(job: RankJob, num_bytes: int) -> PoolAccess:
    """Make a pool, as that of an instance of one rank on this node is made. Raises ConfigError."""
    me, key = Identity(f"doctor-{job.rank}", str(os.getpid()), os.getpid()), bytes.fromhex(job.key)
    if torch.cuda.is_available():
        card = job.card % torch.cuda.device_count()
        torch.cuda.set_device(card)
        device = CudaDevice(card)
        memory = take_device_memory(device, num_bytes)
        media = device_media(job.transfer, device)
        return device_access(
            job.transfer,
            me,
            job.host,
            key=key,
            memory=memory,
            num_bytes=num_bytes,
            media=media,
            security=job.security,
        )
    return remote_access(
        job.transfer, me, job.host, receives=True, key=key, num_bytes=num_bytes, security=job.security
    )


def _region(text: str) -> RegionKey:
    return decode_one_of({"RegionKey": RegionKey}, bytes.fromhex(text))


def pool_bytes(store: TCPStore, job: RankJob, room: int) -> int:
    """Return how large every rank's pool is: as large as a burst, unless one has less room than that. Each rank writes into all
    of another's pool, so they have to be alike. Blocks until each has said what `room` it has, before anyone takes any."""
    return min(_WRITES * job.mib << 20, *map(int, exchange(store, job, "room", str(room))))


def main() -> None:
    logging.basicConfig(level=logging.WARNING)
    job = read_job()
    torch.set_num_threads(1)
    store = meet(job)
    room = shutil.disk_usage("/dev/shm").free // _SHARE_OF_SHARED_MEMORY
    num_bytes = pool_bytes(store, job, room)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        found = runner.run(measure(job, store, open_pool(job, num_bytes), num_bytes))
    store.set(f"left/{job.rank}", "")
    for rank in range(job.world if job.rank == 0 else 0):
        store.get(f"left/{rank}")  # the store ends with its process: rank 0 leaves last
    sys.stdout.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
