"""The host's way into a device's memory and out of it: through pinned memory, on streams of its own.

Threads that use a port wait for their bytes. Nobody who launches steps does: what a step must wait for it waits for on its own
stream, by `PoolMemory.order`."""

import contextlib
import threading
from collections.abc import Callable, Iterable, Sequence

from device.poller import Poller
from device.ring import Fill, PinnedRing, in_slots
from device.seam import ComputeDevice, Copy, DeviceStream, Event, Region

Range = tuple[int, int]
"""Where it begins in the region, and its bytes."""


class PoolMemory:
    """One region of a device, and the reads of it that its next writers must wait for. For any thread."""

    def __init__(self, device: ComputeDevice, region: Region, poller: Poller) -> None:
        self.device, self.region, self.poller = device, region, poller
        self._lock = threading.Lock()
        self._last_read: Event | None = None

    def read_until(self, event: Event) -> None:
        """Bytes whose owner may change any moment are being read until `event`, of one and the same stream each time."""
        with self._lock:
            self._last_read = event

    def order(self, stream: DeviceStream) -> None:
        """What comes next on `stream` may write whatever was free before."""
        with self._lock:
            last = self._last_read
        if last is not None:
            stream.wait(last)

    def settle(self) -> None:
        """As `order`, for what writes the region without a stream. Blocks."""
        with self._lock:
            last = self._last_read
        if last is not None:
            self.poller.wait([last])

    def parts(self, ranges: Iterable[Range]) -> list[Region]:
        return [self.region.part(start, num_bytes) for start, num_bytes in ranges]


class HostPort:
    """For one thread at a time. Raises DeviceError."""

    def __init__(self, memory: PoolMemory, name: str, slot_bytes: int, num_slots: int = 2) -> None:
        self._memory, self._poller = memory, memory.poller
        self._stream = memory.device.stream(name)
        self.ring = PinnedRing(memory.device, slot_bytes, num_slots)

    def write(self, ranges: Sequence[Range], fill: Fill) -> None:
        """What `fill` says goes into the ranges, while it fills the next slot.

        Returns, or raises, when nothing is on its way into them any more."""
        events: list[Event] = []
        try:
            for part in in_slots(ranges, self.ring.slot_bytes):
                slot = self.ring.take()
                try:
                    fill(slot, part)
                    self._memory.order(self._stream)
                    self._copy(slot.region, part, to_device=True)
                    event = self._stream.record()
                except BaseException:
                    self.ring.give_back(slot)
                    raise
                events.append(event)
                self._poller.when_done(event, lambda _, slot=slot: self.ring.give_back(slot))
        finally:
            self._poller.wait(events)

    def read(
        self, ranges: Sequence[Range], take: Callable[[memoryview], object], after: Sequence[Event] = ()
    ) -> None:
        """`take` gets the ranges' bytes, in order, a slot's worth at a time, as they are behind `after`."""
        for event in after:
            self._stream.wait(event)
        for part in in_slots(ranges, self.ring.slot_bytes):
            slot = self.ring.take()
            try:
                self._copy(slot.region, part, to_device=False)
                self._poller.wait([self._stream.record()])
                take(slot.pieces([sum(size for _, size in part)], write=False)[0])
            finally:
                self.ring.give_back(slot)

    def close(self) -> None:
        with contextlib.suppress(Exception):  # a device that has failed is given back by its process' end
            self._stream.close()
        self.ring.close()

    def _copy(self, pinned: Region, ranges: Sequence[Range], *, to_device: bool) -> None:
        copies: list[Copy] = []
        at = 0
        for there in self._memory.parts(ranges):
            here = pinned.part(at, there.num_bytes)
            copies.append(Copy(there, here) if to_device else Copy(here, there))
            at += there.num_bytes
        self._stream.copy(copies)
