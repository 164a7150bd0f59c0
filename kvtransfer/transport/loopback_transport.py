"""Transfers within one process: the executable specification. Under virtual time pools have no bytes and writes take modelled
time."""

from collections.abc import Awaitable, Callable, Sequence

from core.errors import ReplicaLost
from core.kv import KVShard
from core.messages import RegionKey
from kvtransfer.copies import CopyRun
from kvtransfer.transport.base import Arrived, MayWrite
from kvtransfer.wire import POOL_FORMAT

Delay = Callable[[int], Awaitable[None]]
"""Waits for as long as the transfer of so many bytes would take."""


class LoopbackFabric:
    """All receivers of one process, by endpoint."""

    def __init__(self, delay: Delay | None = None) -> None:
        self.delay = delay
        self.receivers: dict[str, LoopbackReceiver] = {}


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
        return RegionKey(
            transport="loopback",
            endpoint=self._endpoint,
            name=POOL_FORMAT,
            host="process",
            shard=shard,
            num_blocks=num_blocks,
        )

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
        then()  # `accept` is never half done

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
        if receiver is None:
            raise ReplicaLost(f"the KV pool {region.endpoint} is gone")
        receiver.accept(grant_id, runs, self._source)

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
