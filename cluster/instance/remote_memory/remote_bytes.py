"""Blocks on their way between an instance's lower tiers and a memory that its memory server alone reaches: words go over the
socket, bytes through memory of the host that both have mapped."""

import asyncio
import mmap
import os
from collections import deque
from collections.abc import Sequence
from functools import partial

from cluster.instance.remote_memory.memory_messages import RestoreBytes, SaveBytes
from cluster.instance.remote_memory.remote_host import RemoteHost
from device.port import Range
from engine.ranks.rank_messages import MemoryPlace
from engine.tiers.pool_bytes import Then

_NUM_SAVES = 8
"""How many blocks may be on their way out at once."""
NUM_SLOTS = _NUM_SAVES + 1
"""Blocks that the mapped memory has room for: the last one comes back."""


class RemoteBytes:
    """engine.tiers.pool_bytes.PoolBytes. A block is read when `settled` returns; until then nobody may write it."""

    def __init__(self, remote: RemoteHost, place: MemoryPlace) -> None:
        """`place` is where the memory that both map is."""
        self._remote = remote
        self._slot_bytes = place.num_bytes // NUM_SLOTS
        descriptor = os.open(place.path, os.O_RDWR)
        try:
            self._shared = memoryview(mmap.mmap(descriptor, place.num_bytes))
        finally:
            os.close(descriptor)
        self._free = deque(number * self._slot_bytes for number in range(_NUM_SAVES))
        self._waiting: deque[tuple[Sequence[Range], Then]] = deque()
        self._num_left = 0
        self._idle = asyncio.Event()
        self._idle.set()

    def save(self, ranges: Sequence[Range], then: Then) -> None:
        self._num_left += 1
        self._idle.clear()
        self._waiting.append((ranges, then))
        self._begin()

    async def settled(self) -> None:
        """Wait until nothing is being saved."""
        await self._idle.wait()

    def write(self, pieces: Sequence[tuple[int, memoryview]]) -> None:
        first = at = _NUM_SAVES * self._slot_bytes
        for _, content in pieces:
            self._shared[at : at + len(content)] = content
            at += len(content)
        starts, sizes = tuple(start for start, _ in pieces), tuple(len(content) for _, content in pieces)
        asking = self._ask(RestoreBytes(number=0, starts=starts, sizes=sizes, source=first))
        asyncio.run_coroutine_threadsafe(asking, self._remote.loop).result()

    def close(self) -> None:
        asyncio.run_coroutine_threadsafe(self.settled(), self._remote.loop).result()

    async def _ask(self, word: RestoreBytes) -> None:
        await self._remote.ask(word)

    def _begin(self) -> None:
        while self._free and self._waiting:
            slot, (ranges, then) = self._free.popleft(), self._waiting.popleft()
            starts, sizes = tuple(start for start, _ in ranges), tuple(size for _, size in ranges)
            asked = self._remote.ask(SaveBytes(number=0, starts=starts, sizes=sizes, destination=slot))
            asked.add_done_callback(partial(self._saved, slot, sum(sizes), then))

    def _saved(self, slot: int, size: int, then: Then, asked: "asyncio.Future[int]") -> None:
        is_there = not asked.cancelled() and asked.exception() is None  # otherwise the instance fails
        content = bytes(self._shared[slot : slot + size]) if is_there else b""
        self._free.append(slot)
        self._num_left -= 1
        self._begin()
        if not self._num_left:
            self._idle.set()
        if is_there:
            then(content)
