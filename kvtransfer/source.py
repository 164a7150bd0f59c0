"""How what a writer has computed gets from its pool to a sender.

Senders of host memory read a pool that lies there. A pool on a device is staged for them in a ring of pinned memory. Copies, and
senders of device memory, begin when the host has seen that the layer is there, which no event may say (engine's layer marks)."""

import asyncio
from collections.abc import Collection, Sequence
from typing import Protocol

from core.messages import RegionKey
from device.port import PoolMemory
from device.ring import PinnedRing, Slot
from device.seam import Copy, Event
from kvtransfer.copies import CopyRun, chunk_runs
from kvtransfer.transport.base import Sender


class Source(Protocol):
    def mark(self) -> tuple[Event, ...]:
        """Return what is done once all work that has been launched so far is. For the compute thread."""
        ...

    async def write(
        self,
        sender: Sender,
        grant_id: str,
        region: RegionKey,
        runs: Sequence[CopyRun],
        after: Sequence[Event],
    ) -> None:
        """Have `sender` write what the pool holds behind `after`. Returns, or raises, when the pool may be reused."""
        ...

    async def close(self) -> None: ...


class HostSource:
    """A pool that senders read where it lies. What has been computed is there."""

    def mark(self) -> tuple[Event, ...]:
        return ()

    async def write(
        self,
        sender: Sender,
        grant_id: str,
        region: RegionKey,
        runs: Sequence[CopyRun],
        after: Sequence[Event],
    ) -> None:
        await sender.write(grant_id, region, runs)

    async def close(self) -> None:
        """Nothing is kept."""


class DeviceSource:
    """A pool on a device. All but `mark` is for the event loop's thread."""

    def __init__(self, memory: PoolMemory, ring: PinnedRing | None, direct: Collection[str] = ()) -> None:
        """`ring` is the memory that senders read, but for those named in `direct`, which read the device's. None: all do."""
        self._memory, self._ring, self._direct = memory, ring, frozenset(direct)
        self._stream = memory.device.stream("send")

    def mark(self) -> tuple[Event, ...]:
        return (self._memory.device.compute.record(),)

    async def write(
        self,
        sender: Sender,
        grant_id: str,
        region: RegionKey,
        runs: Sequence[CopyRun],
        after: Sequence[Event],
    ) -> None:
        await self._memory.poller.done(after)
        if sender.name in self._direct:
            await sender.write(grant_id, region, runs)
            return
        assert self._ring is not None, "somebody reads host memory"
        await self._write_staged(self._ring, sender, grant_id, region, runs)

    async def close(self) -> None:
        await asyncio.to_thread(self._stream.close)
        if self._ring is not None:
            self._ring.close()

    async def _write_staged(
        self,
        ring: PinnedRing,
        sender: Sender,
        grant_id: str,
        region: RegionKey,
        runs: Sequence[CopyRun],
    ) -> None:
        groups = chunk_runs(runs, ring.slot_bytes)
        staged: asyncio.Task[Slot] | None = None
        try:
            for number, group in enumerate(groups):
                slot = await (staged or self._begin(ring, group))
                later = groups[number + 1 : number + 2]
                staged = self._begin(ring, later[0]) if later else None
                try:
                    await sender.write(grant_id, region, _from_slot(group, slot))
                finally:
                    ring.give_back(slot)
        finally:
            if staged is not None:
                await _drop(ring, staged)

    def _begin(self, ring: PinnedRing, group: Sequence[CopyRun]) -> "asyncio.Task[Slot]":
        return asyncio.get_running_loop().create_task(self._stage(ring, group))

    async def _stage(self, ring: PinnedRing, group: Sequence[CopyRun]) -> Slot:
        """A slot with the group's bytes, for the host to read."""
        slot = await ring.taken()
        try:
            try:
                self._stream.copy(self._copies(group, slot))
            finally:
                await self._memory.poller.done([self._stream.record()])
            # The copy is done: senders read the slot from now on.
            slot.pieces([sum(run.num_bytes for run in group)], write=False)
            return slot
        except BaseException:
            ring.give_back(slot)
            raise

    def _copies(self, group: Sequence[CopyRun], slot: Slot) -> list[Copy]:
        copies: list[Copy] = []
        at = 0
        for run in group:
            source = self._memory.region.part(run.source, run.num_bytes)
            copies.append(Copy(slot.region.part(at, run.num_bytes), source))
            at += run.num_bytes
        return copies


async def _drop(ring: PinnedRing, staged: "asyncio.Task[Slot]") -> None:
    staged.cancel()
    (left,) = await asyncio.gather(staged, return_exceptions=True)
    if isinstance(left, Slot):
        ring.give_back(left)


def _from_slot(group: Sequence[CopyRun], slot: Slot) -> list[CopyRun]:
    at = slot.offset
    runs: list[CopyRun] = []
    for run in group:
        runs.append(CopyRun(at, run.destination, run.num_bytes))
        at += run.num_bytes
    return runs
