"""KV pools in the memory of simulated devices, for the suites over every transport."""

from collections.abc import Sequence

import numpy as np

from core.messages import RegionKey
from device.poller import Poller
from device.port import HostPort, PoolMemory
from device.ring import PinnedRing, Slot
from device.simulated import SimulatedDevice
from kvtransfer.copies import CopyRun
from kvtransfer.source import DeviceSource
from kvtransfer.transport.base import Sender

DEVICE = SimulatedDevice(seed=22)
"""All of this process' pools are on it: whoever has used it asks whether there are `violations`."""


class DevicePoolView:
    """A pool on the device, in which tests look and write as in a memoryview."""

    def __init__(
        self, num_bytes: int, device: SimulatedDevice = DEVICE, poller: Poller | None = None
    ) -> None:
        self.memory = PoolMemory(device, device.allocate(num_bytes), poller or Poller())
        self._port = HostPort(self.memory, "test", 1 << 12)

    def __len__(self) -> int:
        return self.memory.region.num_bytes

    def __bytes__(self) -> bytes:
        return self[:]

    def __getitem__(self, at: slice) -> bytes:
        """Return what is there at this moment, ordered or not."""
        return np.asarray(self.memory.device.array(self.memory.region))[at].tobytes()

    def __setitem__(self, at: slice, content: bytes) -> None:
        start, end, _ = at.indices(len(self))

        def fill(slot: Slot, part: Sequence[tuple[int, int]]) -> None:
            sizes = [size for _, size in part]
            for (begin, size), piece in zip(part, slot.pieces(sizes, write=True), strict=True):
                piece[:] = content[begin - start : begin - start + size]

        self._port.write([(start, end - start)], fill)


class FromDevice:
    """A Sender of host memory, or of the device's where it is `direct`, that writes a pool on a device."""

    def __init__(self, inner: Sender, memory: PoolMemory, ring: PinnedRing, *, direct: bool = False) -> None:
        self.name, self.vouches = inner.name, inner.vouches
        self.reaches, self.probe = inner.reaches, inner.probe
        self.ended, self.forget = inner.ended, inner.forget
        self._inner = inner
        self._source = DeviceSource(memory, ring, (inner.name,) if direct else ())

    async def write(self, grant_id: str, region: RegionKey, runs: Sequence[CopyRun]) -> None:
        await self._source.write(self._inner, grant_id, region, runs, self._source.mark())

    async def close(self) -> None:
        await self._inner.close()
        await self._source.close()
