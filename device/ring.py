"""A bounded number of equal pieces of pinned host memory, through which bytes go to and from a device.

Invariant: a slot is given back when nothing works on it any more, and only then has somebody else."""

import asyncio
import threading
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from dataclasses import dataclass

from device.seam import ComputeDevice, Region


@dataclass(frozen=True, slots=True)
class Slot:
    offset: int
    """Where it begins in the ring's memory."""
    region: Region
    device: ComputeDevice

    def pieces(self, sizes: Iterable[int], *, write: bool) -> list[memoryview]:
        """Neighbouring bytes from the slot's beginning on, for the host to read, or to write, at once."""
        sizes = list(sizes)
        view = self.device.host_view(self.region.part(0, sum(sizes)), write=write)
        ends = [sum(sizes[: number + 1]) for number in range(len(sizes))]
        return [view[end - size : end] for size, end in zip(sizes, ends, strict=True)]


class PinnedRing:
    """For any thread. Slots are taken in the order of asking."""

    def __init__(self, device: ComputeDevice, slot_bytes: int, num_slots: int) -> None:
        self.slot_bytes = slot_bytes
        self._device, self._num_slots = device, num_slots
        self._region = device.pinned(slot_bytes * num_slots)
        self._lock = threading.Lock()
        self._free = deque(
            Slot(at, self._region.part(at, slot_bytes), device)
            for at in range(0, slot_bytes * num_slots, slot_bytes)
        )
        self._waiting: deque[Future[Slot]] = deque()
        self._is_closing = False

    @property
    def memory(self) -> memoryview:
        """All slots' memory, for what reads and writes it by offset."""
        return self._device.host_view(self._region, write=True)

    def take(self) -> Slot:
        """Blocks until there is one."""
        return self._ask().result()

    async def taken(self) -> Slot:
        """As `take`, for a loop's thread."""
        asked = self._ask()
        try:
            return await asyncio.wrap_future(asked)
        except asyncio.CancelledError:
            if not asked.cancel() and not asked.cancelled():
                self.give_back(asked.result())
            raise

    def give_back(self, slot: Slot) -> None:
        with self._lock:
            while self._waiting:
                if self._hand(self._waiting.popleft(), slot):
                    return
            self._free.append(slot)
            self._end_if_whole()

    def close(self) -> None:
        """Its memory is given back with the last slot."""
        with self._lock:
            self._is_closing = True
            self._end_if_whole()

    def _ask(self) -> "Future[Slot]":
        asked: Future[Slot] = Future()
        with self._lock:
            if self._free:
                self._hand(asked, self._free.popleft())
            else:
                self._waiting.append(asked)
        return asked

    def _hand(self, asked: "Future[Slot]", slot: Slot) -> bool:
        """False where nobody waits any more."""
        if not asked.set_running_or_notify_cancel():
            return False
        asked.set_result(slot)
        return True

    def _end_if_whole(self) -> None:
        if self._is_closing and len(self._free) == self._num_slots:
            self._num_slots = -1
            self._device.free(self._region)


def in_slots(ranges: Iterable[tuple[int, int]], slot_bytes: int) -> list[list[tuple[int, int]]]:
    """(start, bytes), in order, in groups of `slot_bytes` (the last may be smaller); a range may be cut."""
    groups: list[list[tuple[int, int]]] = []
    room = 0
    for start, num_bytes in ranges:
        end = start + num_bytes
        while start < end:
            if not room:
                groups.append([])
                room = slot_bytes
            size = min(room, end - start)
            groups[-1].append((start, size))
            start, room = start + size, room - size
    return groups


Fill = Callable[[Slot, list[tuple[int, int]]], None]
"""(slot, ranges): put into the slot, from its beginning, what belongs into these ranges."""
