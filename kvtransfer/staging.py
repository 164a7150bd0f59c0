"""Conversion of pushed vectors into the holder's storage, in memory behind the pool that senders read like the pool itself.

Slots: while one is being sent another is filled. Invariant: a slot is refilled only after its write has returned."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from core.errors import DeviceError, TransferError
from core.kv import RankPool
from core.messages import RegionKey
from core.threads import in_thread
from device.convert import Bytes, convert
from device.port import PoolMemory
from device.seam import Conversion, Event, Region
from kvtransfer.copies import CopyRun, VectorRuns, byte_runs, group_vectors
from kvtransfer.source import Source
from kvtransfer.transport.base import Sender

STAGING_BYTES = 32 << 20
_NUM_SLOTS = 2
_ALIGNED = 16


class Staging(Protocol):
    """Where a memory's KV is converted for holders that store it otherwise."""

    async def push(
        self,
        sender: Sender,
        grant_id: str,
        region: RegionKey,
        runs: VectorRuns,
        source: RankPool,
        after: Sequence[Event],
    ) -> int:
        """Convert runs of a pool in this memory, as they are behind `after`, and have `sender`, which reads it, write them.
        Returns the bytes sent. Raises ReplicaLost and TransferError."""
        ...


class _Slots:
    """Room to convert in, two vectors with their scales at least: so many bytes from `start` on."""

    def __init__(self, start: int, end: int) -> None:
        first = -(-start // _ALIGNED) * _ALIGNED
        self._num_bytes = (end - first) // _NUM_SLOTS // _ALIGNED * _ALIGNED
        self._free: asyncio.Queue[int] = asyncio.Queue()
        for number in range(_NUM_SLOTS):
            self._free.put_nowait(first + number * self._num_bytes)

    async def push(
        self, runs: VectorRuns, region: RegionKey, send: Callable[[VectorRuns, int], Awaitable[list[CopyRun]]]
    ) -> int:
        """Have `send` convert each group in a slot and write it; nobody else has the slot until then. Returns the bytes sent."""
        num_bytes = 0
        for group in self._groups(runs, region):
            slot = await self._free.get()
            try:
                copies = await send(group, slot)
            finally:
                self._free.put_nowait(slot)
            num_bytes += sum(copy.num_bytes for copy in copies)
        return num_bytes

    def _groups(self, runs: VectorRuns, region: RegionKey) -> list[VectorRuns]:
        """Cut the runs into what a slot has room for."""
        layout = region.shard.layout
        room = self._num_bytes - (_ALIGNED if layout.scale_bytes else 0)
        return group_vectors(runs, room // (layout.vector_bytes + layout.scale_bytes))


@dataclass(frozen=True, slots=True)
class _Staged:
    """Where in a slot a group's vectors lie when they are converted, and their scales behind them, if there are any."""

    data: int
    data_bytes: int
    scales: int
    scales_bytes: int

    @classmethod
    def at(cls, slot: int, runs: VectorRuns, region: RegionKey) -> "_Staged":
        layout, total = region.shard.layout, int(runs[:, 2].sum())
        data_bytes = total * layout.vector_bytes
        scales = slot + -(-data_bytes // _ALIGNED) * _ALIGNED
        return cls(slot, data_bytes, scales, total * layout.scale_bytes)

    def copies(self, runs: VectorRuns, region: RegionKey) -> list[CopyRun]:
        """Return the runs from here to where each belongs. Data of all runs comes first."""
        packed = runs.copy()
        packed[:, 0] = np.cumsum(runs[:, 2]) - runs[:, 2]
        layout = region.shard.layout
        copies = byte_runs(packed, layout.vector_bytes, self.data, region.base_bytes)
        if self.scales_bytes:
            there = region.base_bytes + region.shard.data_bytes(region.num_blocks)
            copies += byte_runs(packed, layout.scale_bytes, self.scales, there)
        return copies


class HostStaging:
    """`Staging` in host memory: what follows its first `pool_bytes`."""

    def __init__(self, memory: memoryview, pool_bytes: int) -> None:
        self._memory, self._slots = np.frombuffer(memory, np.uint8), _Slots(pool_bytes, len(memory))

    async def push(
        self,
        sender: Sender,
        grant_id: str,
        region: RegionKey,
        runs: VectorRuns,
        source: RankPool,
        after: Sequence[Event],
    ) -> int:
        async def send(group: VectorRuns, slot: int) -> list[CopyRun]:
            copies = await in_thread(lambda: self._convert(group, source, region, slot))
            await sender.write(grant_id, region, copies)
            return copies

        return await self._slots.push(runs, region, send)

    def _convert(self, runs: VectorRuns, source: RankPool, region: RegionKey, slot: int) -> list[CopyRun]:
        ours, staged = source.shard.layout, _Staged.at(slot, runs, region)
        gathered, scales = self._read(runs, ours.vector_bytes, source.base_bytes), None
        if ours.scale_bytes:
            scales = self._read(runs, ours.scale_bytes, _scales_of(source)).view(np.float32)
        data, new_scales = convert(ours, gathered, scales, region.shard.layout)
        self._memory[staged.data : staged.data + staged.data_bytes] = data
        if new_scales is not None:
            self._memory[staged.scales : staged.scales + staged.scales_bytes] = new_scales.view(np.uint8)
        return staged.copies(runs, region)

    def _read(self, runs: VectorRuns, item_bytes: int, base: int) -> Bytes:
        parts = byte_runs(runs, item_bytes, base, 0)
        return np.concatenate([self._memory[part.source : part.source + part.num_bytes] for part in parts])


class DeviceStaging:
    """`Staging` in a device's memory: what follows its first `pool_bytes`. For the event loop's thread."""

    def __init__(self, memory: PoolMemory, pool_bytes: int, source: Source) -> None:
        """`source` is how senders read that memory."""
        self._memory, self._source = memory, source
        self._slots = _Slots(pool_bytes, memory.region.num_bytes)
        self._stream = memory.device.stream("convert")

    async def push(
        self,
        sender: Sender,
        grant_id: str,
        region: RegionKey,
        runs: VectorRuns,
        source: RankPool,
        after: Sequence[Event],
    ) -> int:
        async def send(group: VectorRuns, slot: int) -> list[CopyRun]:
            copies = await self._convert(group, source, region, slot)
            await self._source.write(sender, grant_id, region, copies, ())
            return copies

        await self._memory.poller.done(after)
        return await self._slots.push(runs, region, send)

    async def _convert(
        self, runs: VectorRuns, source: RankPool, region: RegionKey, slot: int
    ) -> list[CopyRun]:
        staged = _Staged.at(slot, runs, region)
        work = Conversion(
            source=source.shard.layout,
            target=region.shard.layout,
            data=self._from(source.base_bytes, source.shard.data_bytes(source.num_blocks)),
            scales=self._scales(source),
            runs=runs[:, [0, 2]],
            packed=self._from(staged.data, staged.data_bytes),
            packed_scales=self._from(staged.scales, staged.scales_bytes) if staged.scales_bytes else None,
        )
        try:
            self._stream.convert(work)
        except DeviceError as error:
            raise TransferError(str(error)) from error
        finally:
            await self._memory.poller.done([self._stream.record()])
        return staged.copies(runs, region)

    def _scales(self, source: RankPool) -> Region | None:
        if not source.shard.layout.scale_bytes:
            return None
        at = _scales_of(source)
        return self._from(at, source.base_bytes + source.num_bytes - at)

    def _from(self, start: int, num_bytes: int) -> Region:
        return self._memory.region.part(start, num_bytes)


def _scales_of(pool: RankPool) -> int:
    return pool.base_bytes + pool.shard.data_bytes(pool.num_blocks)
