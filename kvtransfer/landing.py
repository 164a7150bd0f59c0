"""Where bytes go that a connection's thread receives: into a pool in host memory, or through pinned memory onto a device."""

from collections.abc import Callable, Sequence
from typing import Protocol

from device.port import HostPort, PoolMemory
from device.ring import Slot
from kvtransfer.transport.checks import crc_of

_SLOT_BYTES = 1 << 20
"""Bytes of one of two slots for each connection. Nobody else uses them: a writer that stops half-way holds up itself alone."""
Receive = Callable[[Sequence[memoryview]], None]


class Landing(Protocol):
    """For one thread."""

    def take(self, ranges: Sequence[tuple[int, int]], receive: Receive, *, checked: bool) -> int:
        """Have `receive` fill (start, bytes) of the pool, in order. Returns the bytes' CRC-32 where `checked`.

        Returns, or raises, when nothing is on its way into the pool any more."""
        ...

    def close(self) -> None: ...


class HostLanding:
    def __init__(self, pool: memoryview) -> None:
        self._pool = pool

    def take(self, ranges: Sequence[tuple[int, int]], receive: Receive, *, checked: bool) -> int:
        targets = [self._pool[start : start + size] for start, size in ranges]
        receive(targets)
        return crc_of(targets) if checked else 0

    def close(self) -> None:
        """Nothing is kept."""


class DeviceLanding:
    def __init__(self, memory: PoolMemory) -> None:
        self._memory = memory
        self._port: HostPort | None = None

    def take(self, ranges: Sequence[tuple[int, int]], receive: Receive, *, checked: bool) -> int:
        if self._port is None:
            self._port = HostPort(self._memory, "receive", _SLOT_BYTES)
        crc = 0

        def fill(slot: Slot, part: Sequence[tuple[int, int]]) -> None:
            nonlocal crc
            pieces = slot.pieces([size for _, size in part], write=True)
            receive(pieces)
            crc = crc_of(pieces, crc) if checked else 0

        self._port.write(ranges, fill)
        return crc

    def close(self) -> None:
        if self._port is not None:
            self._port.close()


def landing_in(pool: memoryview | PoolMemory) -> Landing:
    return DeviceLanding(pool) if isinstance(pool, PoolMemory) else HostLanding(pool)
