"""Conversion of pushed vectors into the holder's storage, in memory behind the pool that senders read like the pool itself.

Two slots: while one is being sent the other is filled. Invariant: a slot is refilled only after its write has returned."""

import asyncio
import threading
from collections.abc import Awaitable, Callable, Sequence

import numpy as np

from core.kv import SCALE_BYTES
from device.port import HostPort, PoolMemory
from device.seam import Event
from kvtransfer.convert import Bytes, convert
from kvtransfer.copies import CopyRun, Side, VectorRuns, byte_runs, group_vectors

STAGING_BYTES = 32 << 20
_NUM_SLOTS = 2
_READ_BYTES = 4 << 20
Send = Callable[[list[CopyRun]], Awaitable[None]]


Read = Callable[[Sequence[tuple[int, int]], Sequence[Event]], Bytes]
"""(ranges of the pool, events) -> their bytes, in order, as they are behind the events. Blocks."""


class Staging:
    """Room to convert in: what follows the first `pool_bytes` of `memory`, two vectors with their scales at least."""

    def __init__(self, memory: memoryview, pool_bytes: int, read: Read | None = None) -> None:
        """`read` reads the pool; none means that it is those first bytes."""
        self._memory = np.frombuffer(memory, np.uint8)
        self._read = read or self._read_memory
        self._slot_bytes = (len(memory) - pool_bytes) // _NUM_SLOTS // SCALE_BYTES * SCALE_BYTES
        self._slots: asyncio.Queue[int] = asyncio.Queue()
        for number in range(_NUM_SLOTS):
            self._slots.put_nowait(pool_bytes + number * self._slot_bytes)

    async def push(
        self,
        runs: VectorRuns,
        source: Side,
        destination: Side,
        send: Send,
        after: Sequence[Event] = (),
    ) -> int:
        """Convert the runs, as they are behind `after`, and hand them to `send`, a slot at a time. Returns the bytes sent."""
        layout = destination.shard.layout
        capacity = self._slot_bytes // (layout.vector_bytes + layout.scale_bytes)
        num_bytes = 0
        for group in group_vectors(runs, capacity):
            slot = await self._slots.get()
            try:
                copies = await asyncio.to_thread(self._convert, group, source, destination, slot, after)
                await send(copies)
            finally:
                self._slots.put_nowait(slot)
            num_bytes += sum(copy.num_bytes for copy in copies)
        return num_bytes

    def _convert(
        self, runs: VectorRuns, source: Side, destination: Side, slot: int, after: Sequence[Event]
    ) -> list[CopyRun]:
        """Convert on a thread. Data of all runs comes first, then their scales."""
        ours, theirs = source.shard.layout, destination.shard.layout
        total = int(runs[:, 2].sum())
        gathered = self._read(_ranges(source.base_bytes, runs, ours.vector_bytes), after)
        scales = None
        if ours.scale_bytes:
            scales = self._read(_ranges(source.scales_bytes, runs, SCALE_BYTES), after).view(np.float32)
        data, new_scales = convert(ours, gathered, scales, theirs)
        self._memory[slot : slot + data.nbytes] = data
        copies = _spread(runs, slot, destination.base_bytes, theirs.vector_bytes)
        if new_scales is not None:
            at = slot + total * theirs.vector_bytes
            self._memory[at : at + new_scales.nbytes] = new_scales.view(np.uint8)
            copies += _spread(runs, at, destination.scales_bytes, theirs.scale_bytes)
        return copies

    def _read_memory(self, ranges: Sequence[tuple[int, int]], after: Sequence[Event]) -> Bytes:
        return np.concatenate([self._memory[start : start + size] for start, size in ranges])


class DeviceReader:
    """`Read` of a pool on a device, for any thread."""

    def __init__(self, memory: PoolMemory) -> None:
        self._port, self._lock = HostPort(memory, "convert", _READ_BYTES), threading.Lock()

    def __call__(self, ranges: Sequence[tuple[int, int]], after: Sequence[Event]) -> Bytes:
        found = bytearray()
        with self._lock:
            self._port.read(ranges, found.extend, after)
        return np.frombuffer(found, np.uint8)


def _ranges(base: int, runs: VectorRuns, item_bytes: int) -> list[tuple[int, int]]:
    return [(run.source, run.num_bytes) for run in byte_runs(runs, item_bytes, base, 0)]


def _spread(runs: VectorRuns, staged: int, base: int, item_bytes: int) -> list[CopyRun]:
    """Return the runs from one piece of staged items to where each belongs, counted from `base`."""
    packed = runs.copy()
    packed[:, 0] = np.cumsum(runs[:, 2]) - runs[:, 2]
    return byte_runs(packed, item_bytes, staged, base)
