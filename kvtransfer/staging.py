"""Conversion of pushed vectors into the holder's storage, in memory behind the pool that senders read like the pool itself.

Two slots: while one is being sent the other is filled. Invariant: a slot is refilled only after its write has returned."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence

import numpy as np

from core.kv import SCALE_BYTES
from kvtransfer.convert import Bytes, convert
from kvtransfer.copies import CopyRun, Side, VectorRun

STAGING_BYTES = 32 << 20
_NUM_SLOTS = 2
Send = Callable[[list[CopyRun]], Awaitable[None]]


class Staging:
    """Room to convert in. `memory` is a pool of `pool_bytes` followed by that room: two vectors with their scales at least."""

    def __init__(self, memory: memoryview, pool_bytes: int) -> None:
        self._memory = np.frombuffer(memory, np.uint8)
        self._slot_bytes = (len(memory) - pool_bytes) // _NUM_SLOTS // SCALE_BYTES * SCALE_BYTES
        self._slots: asyncio.Queue[int] = asyncio.Queue()
        for number in range(_NUM_SLOTS):
            self._slots.put_nowait(pool_bytes + number * self._slot_bytes)

    async def push(self, runs: Sequence[VectorRun], source: Side, destination: Side, send: Send) -> int:
        """Convert the runs and hand them to `send`, a slot at a time. Returns the bytes sent."""
        layout = destination.shard.layout
        capacity = self._slot_bytes // (layout.vector_bytes + layout.scale_bytes)
        num_bytes = 0
        for group in _groups(runs, capacity):
            slot = await self._slots.get()
            try:
                copies = await asyncio.to_thread(self._convert, group, source, destination, slot)
                await send(copies)
            finally:
                self._slots.put_nowait(slot)
            num_bytes += sum(copy.num_bytes for copy in copies)
        return num_bytes

    def _convert(
        self, runs: Sequence[VectorRun], source: Side, destination: Side, slot: int
    ) -> list[CopyRun]:
        """Convert on a thread. Data of all runs comes first, then their scales."""
        ours, theirs = source.shard.layout, destination.shard.layout
        total = sum(run.count for run in runs)
        gathered = np.concatenate([self._vectors(source, run) for run in runs])
        scales = None
        if ours.scale_bytes:
            scales = np.concatenate([self._scales(source, run) for run in runs])
            scales = scales.view(np.float32)
        data, new_scales = convert(ours, gathered, scales, theirs)
        self._memory[slot : slot + data.nbytes] = data
        copies = _spread(runs, slot, destination.base_bytes, theirs.vector_bytes)
        if new_scales is not None:
            at = slot + total * theirs.vector_bytes
            self._memory[at : at + new_scales.nbytes] = new_scales.view(np.uint8)
            copies += _spread(runs, at, destination.scales_bytes, theirs.scale_bytes)
        return copies

    def _vectors(self, source: Side, run: VectorRun) -> Bytes:
        return self._items(source.base_bytes, run, source.shard.layout.vector_bytes)

    def _scales(self, source: Side, run: VectorRun) -> Bytes:
        return self._items(source.scales_bytes, run, SCALE_BYTES)

    def _items(self, base: int, run: VectorRun, item_bytes: int) -> Bytes:
        return self._memory[base + run.source * item_bytes : base + (run.source + run.count) * item_bytes]


def _spread(runs: Sequence[VectorRun], staged: int, base: int, item_bytes: int) -> list[CopyRun]:
    """Return the runs from one piece of staged items to where each belongs, counted from `base`."""
    copies: list[CopyRun] = []
    for run in runs:
        copies.append(CopyRun(staged, base + run.destination * item_bytes, run.count * item_bytes))
        staged += run.count * item_bytes
    return copies


def _groups(runs: Sequence[VectorRun], capacity: int) -> list[list[VectorRun]]:
    """Split the runs, in order, into groups of at most `capacity` vectors; a run may be cut."""
    groups: list[list[VectorRun]] = []
    room = 0
    for run in runs:
        done = 0
        while done < run.count:
            if not room:
                groups.append([])
                room = capacity
            count = min(room, run.count - done)
            groups[-1].append(VectorRun(run.source + done, run.destination + done, count))
            done, room = done + count, room - count
    return groups
