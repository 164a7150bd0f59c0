"""The processor as a device: its memory is the host's, and all work is done when it is given."""

import mmap
from collections.abc import Iterable, Sequence

import numpy as np

from core.errors import DeviceError
from device.convert import Bytes, convert_regions
from device.host_memory import address_of, move, view_of
from device.seam import HOST, Conversion, Copy, Event, Region


class _Done:
    def query(self) -> bool:
        return True


_DONE = _Done()


class CpuStream:
    def copy(self, copies: Sequence[Copy]) -> None:
        for copy in copies:
            if copy.source.num_bytes != copy.destination.num_bytes:
                raise DeviceError(f"a copy of {copy.source.num_bytes} bytes to {copy.destination.num_bytes}")
            move(copy.destination.address, copy.source.address, copy.source.num_bytes)

    def convert(self, work: Conversion) -> None:
        convert_regions(work, _bytes)

    def uses(self, reads: Iterable[Region], writes: Iterable[Region]) -> None:
        """Nothing to do."""

    def record(self) -> Event:
        return _DONE

    def wait(self, event: Event) -> None:
        """Nothing to do."""

    def close(self) -> None:
        """Nothing to do."""


class CpuDevice:
    """device.seam.ComputeDevice."""

    number = HOST
    asks_for_uses = False

    def __init__(self) -> None:
        self.compute = CpuStream()
        self._kept: dict[int, mmap.mmap] = {}

    def stream(self, name: str) -> CpuStream:
        return CpuStream()

    def allocate(self, num_bytes: int) -> Region:
        memory = mmap.mmap(-1, max(1, num_bytes))
        address = address_of(memoryview(memory))
        self._kept[address] = memory
        return Region(HOST, address, num_bytes)

    def pinned(self, num_bytes: int) -> Region:
        return self.allocate(num_bytes)

    def free(self, region: Region) -> None:
        if self._kept.pop(region.address, None) is None:
            raise DeviceError(f"there is no allocation at {region.address:#x}")

    def host_view(self, region: Region, *, write: bool) -> memoryview:
        return view_of(region.address, region.num_bytes)

    def array(self, region: Region) -> object:
        return _bytes(region)


def _bytes(region: Region) -> Bytes:
    return np.frombuffer(view_of(region.address, region.num_bytes), np.uint8)
