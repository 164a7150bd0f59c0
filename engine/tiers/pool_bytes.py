"""How blocks get out of a pool and back into it: in host memory at once, on a device through pinned memory."""

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import Protocol

from device.port import HostPort, PoolMemory, Range
from device.ring import PinnedRing, Slot
from device.seam import Copy, Event

log = logging.getLogger(__name__)

_NUM_SAVES = 8
"""How many blocks may be on their way out of a device."""
Then = Callable[[bytes], None]


class PoolBytes(Protocol):
    def save(self, ranges: Sequence[Range], then: Then) -> None:
        """Copy out ranges of the pool, which may be overwritten on return. `then` gets their bytes on the event loop's thread."""
        ...

    def write(self, pieces: Sequence[tuple[int, memoryview]]) -> None:
        """Put bytes into the pool, each from an offset on. Returns when they are there."""
        ...

    def close(self) -> None:
        """Close, once nothing is on its way. Blocks."""
        ...


class HostBytes:
    """A pool in host memory."""

    def __init__(self, memory: memoryview) -> None:
        self._memory = memory

    def save(self, ranges: Sequence[Range], then: Then) -> None:
        then(b"".join(self._memory[start : start + size] for start, size in ranges))

    def write(self, pieces: Sequence[tuple[int, memoryview]]) -> None:
        for start, content in pieces:
            self._memory[start : start + len(content)] = content

    def close(self) -> None:
        """Do nothing: nothing is on its way."""


class DeviceBytes:
    """A pool on a device. Whoever writes a block that is being saved waits for that on the device, by `PoolMemory.order`."""

    def __init__(self, memory: PoolMemory, block_bytes: int) -> None:
        self._memory = memory
        self._port = HostPort(memory, "fill", block_bytes)
        self._ring = PinnedRing(memory.device, block_bytes, _NUM_SAVES)
        self._stream = memory.device.stream("save")

    def save(self, ranges: Sequence[Range], then: Then) -> None:
        # When every slot is in use, this blocks the loop until one block has crossed the bus. A block that is saved later might
        # belong to another sequence by then.
        slot = self._ring.take()
        loop, size = asyncio.get_running_loop(), sum(size for _, size in ranges)
        try:
            event = self._copied(ranges, slot)
        except BaseException:
            self._ring.give_back(slot)
            raise
        self._memory.read_until(event)

        def saved(error: Exception | None) -> None:
            if error:
                log.error("a KV block could not be saved from the device: %s", error)
            elif not loop.is_closed():
                loop.call_soon_threadsafe(then, bytes(slot.pieces([size], write=False)[0]))
            self._ring.give_back(slot)

        self._memory.poller.when_done(event, saved)

    def _copied(self, ranges: Sequence[Range], slot: Slot) -> Event:
        at, copies = 0, list[Copy]()
        for part in self._memory.parts(ranges):
            copies.append(Copy(slot.region.part(at, part.num_bytes), part))
            at += part.num_bytes
        self._stream.copy(copies)
        return self._stream.record()

    def write(self, pieces: Sequence[tuple[int, memoryview]]) -> None:
        rest = memoryview(b"".join(content for _, content in pieces))

        def fill(slot: Slot, part: Sequence[Range]) -> None:
            nonlocal rest
            size = sum(size for _, size in part)
            slot.pieces([size], write=True)[0][:] = rest[:size]
            rest = rest[size:]

        self._port.write([(start, len(content)) for start, content in pieces], fill)

    def close(self) -> None:
        # All slots are free once every save has ended.
        for slot in [self._ring.take() for _ in range(_NUM_SAVES)]:
            self._ring.give_back(slot)
        self._stream.close()
        self._port.close()
        self._ring.close()


def bytes_of_pool(memory: memoryview | PoolMemory, block_bytes: int) -> PoolBytes:
    return DeviceBytes(memory, block_bytes) if isinstance(memory, PoolMemory) else HostBytes(memory)
