"""Transfers within one process: the executable specification. Under virtual time pools have no bytes and writes take modelled
time."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence

from core.errors import ReplicaLost, TransferError
from core.kv import KVShard
from core.messages import RegionKey
from device.port import PoolMemory
from device.seam import Copy
from kvtransfer.copies import CopyRun
from kvtransfer.transport.base import Arrived, MayWrite
from kvtransfer.transport.write_admission import WriteAdmission
from kvtransfer.wire import POOL_FORMAT

Delay = Callable[[int], Awaitable[None]]
"""Waits for as long as the transfer of so many bytes would take."""


class LoopbackFabric:
    """All receivers of one process, by endpoint."""

    def __init__(self, delay: Delay | None = None) -> None:
        self.delay = delay
        self.receivers: dict[str, LoopbackReceiver | DeviceLoopbackReceiver] = {}


class LoopbackReceiver:
    def __init__(
        self,
        fabric: LoopbackFabric,
        endpoint: str,
        buffer: memoryview | None,
        may_write: MayWrite,
        arrived: Arrived,
    ) -> None:
        self._fabric, self._endpoint, self._buffer = fabric, endpoint, buffer
        self._may_write, self._arrived = may_write, arrived
        self.num_refused = 0
        fabric.receivers[endpoint] = self

    def region(self, shard: KVShard, num_blocks: int) -> RegionKey:
        return _region(self._endpoint, shard, num_blocks)

    def accept(self, grant_id: str, runs: Sequence[CopyRun], source: memoryview | None) -> None:
        """Copy the runs that the grant covers; refuse the others."""
        num_bytes = 0
        for run in runs:
            if not self._may_write(grant_id, run.destination, run.destination + run.num_bytes):
                self.num_refused += 1
                continue
            if self._buffer is not None and source is not None:
                self._buffer[run.destination : run.destination + run.num_bytes] = source[
                    run.source : run.source + run.num_bytes
                ]
            num_bytes += run.num_bytes
        self._arrived(grant_id, num_bytes)

    def when_idle(self, grant_id: str, then: Callable[[], None]) -> None:
        then()  # `accept` copies everything before it returns

    def ended(self, grant_id: str) -> None:
        """Do nothing: no state is kept for a grant."""

    async def fence(self, writer: str, grant_id: str) -> None:
        """Return at once: writes are checked against live grants as they are made, on this very loop."""

    async def close(self) -> None:
        self._fabric.receivers.pop(self._endpoint, None)


class LoopbackSender:
    name = "loopback"
    vouches = False

    def __init__(self, fabric: LoopbackFabric, source: memoryview | None) -> None:
        self._fabric, self._source = fabric, source

    def reaches(self, region: RegionKey) -> bool:
        return region.transport == self.name

    async def write(self, grant_id: str, region: RegionKey, runs: Sequence[CopyRun]) -> None:
        if self._fabric.delay is not None:
            await self._fabric.delay(sum(run.num_bytes for run in runs))
        receiver = self._fabric.receivers.get(region.endpoint)
        if not isinstance(receiver, LoopbackReceiver):
            raise ReplicaLost(f"the KV pool {region.endpoint} is gone")
        receiver.accept(grant_id, runs, self._source)

    def carried(self, region: RegionKey) -> None:
        """Return nothing: a write ends when its bytes are there."""

    async def probe(self, region: RegionKey, num_bytes: int) -> int:
        if region.endpoint not in self._fabric.receivers:
            raise ReplicaLost(f"the KV pool {region.endpoint} is gone")
        return num_bytes

    def ended(self, grant_id: str) -> None:
        """Do nothing: no state is kept between writes."""

    def forget(self, endpoint_owner: str) -> None:
        """Do nothing: no state is kept between writes."""

    async def close(self) -> None:
        """Do nothing: no state is kept between writes."""


class DeviceLoopbackReceiver:
    """The holder's side where all pools of a process are on one device: it copies from pool to pool, on a stream of its own."""

    def __init__(
        self, fabric: LoopbackFabric, endpoint: str, memory: PoolMemory, admission: WriteAdmission
    ) -> None:
        self._fabric, self._endpoint = fabric, endpoint
        self._memory, self._admission = memory, admission
        self._stream = memory.device.stream("loopback")
        fabric.receivers[endpoint] = self

    def region(self, shard: KVShard, num_blocks: int) -> RegionKey:
        return _region(self._endpoint, shard, num_blocks)

    async def accept(self, grant_id: str, runs: Sequence[CopyRun], source: PoolMemory) -> None:
        """Copy the runs. Returns, or raises, when that is over. Raises TransferError where the grant does not cover them all."""
        if not self._admission.begin(grant_id, [(run.destination, run.num_bytes) for run in runs]):
            raise TransferError(f"grant {grant_id} does not cover what was written")
        num_bytes = 0
        try:
            await self._copy(runs, source)
            num_bytes = sum(run.num_bytes for run in runs)
        finally:
            self._admission.over(grant_id, num_bytes)

    def when_idle(self, grant_id: str, then: Callable[[], None]) -> None:
        self._admission.when_idle(grant_id, then)

    def ended(self, grant_id: str) -> None:
        """Do nothing: no state is kept for a grant."""

    async def fence(self, writer: str, grant_id: str) -> None:
        """Wait for the copies that are under way."""
        idle = asyncio.Event()
        self._admission.when_idle(grant_id, idle.set)
        await idle.wait()

    async def close(self) -> None:
        if self._fabric.receivers.pop(self._endpoint, None) is not None:
            await asyncio.to_thread(self._stream.close)

    async def _copy(self, runs: Sequence[CopyRun], source: PoolMemory) -> None:
        there, here = self._memory.region, source.region
        self._memory.order(self._stream)
        try:
            self._stream.copy(
                [
                    Copy(there.part(run.destination, run.num_bytes), here.part(run.source, run.num_bytes))
                    for run in runs
                ]
            )
        finally:
            await self._memory.poller.done([self._stream.record()])


class DeviceLoopbackSender:
    """Reads the device's memory: what it writes must be there."""

    name = "loopback"
    vouches = False

    def __init__(self, fabric: LoopbackFabric, source: PoolMemory) -> None:
        self._fabric, self._source = fabric, source

    def reaches(self, region: RegionKey) -> bool:
        return region.transport == self.name

    async def write(self, grant_id: str, region: RegionKey, runs: Sequence[CopyRun]) -> None:
        await self._receiver(region).accept(grant_id, runs, self._source)

    def carried(self, region: RegionKey) -> None:
        """Return nothing: a write ends when its bytes are there."""

    async def probe(self, region: RegionKey, num_bytes: int) -> int:
        self._receiver(region)
        return num_bytes

    def ended(self, grant_id: str) -> None:
        """Do nothing: no state is kept between writes."""

    def forget(self, endpoint_owner: str) -> None:
        """Do nothing: no state is kept between writes."""

    async def close(self) -> None:
        """Do nothing: no state is kept between writes."""

    def _receiver(self, region: RegionKey) -> DeviceLoopbackReceiver:
        receiver = self._fabric.receivers.get(region.endpoint)
        if not isinstance(receiver, DeviceLoopbackReceiver):
            raise ReplicaLost(f"the KV pool {region.endpoint} is gone")
        return receiver


def _region(endpoint: str, shard: KVShard, num_blocks: int) -> RegionKey:
    return RegionKey(
        transport="loopback",
        endpoint=endpoint,
        name=POOL_FORMAT,
        host="process",
        shard=shard,
        num_blocks=num_blocks,
    )
