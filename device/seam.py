"""What is asked of a device: memory, streams of work, events that order them, and copies.

Work on one stream is done in its order. Work on two streams is ordered by an event alone, which the one records and the other
waits for. The host may touch memory that a stream works on once it has seen an event behind that work as done, and whatever the
host has done before it gives a stream work is done before that work."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from core.errors import DeviceError
from core.kv import KVLayout

HOST = -1
"""In place of a device's number."""


@dataclass(frozen=True, slots=True)
class Region:
    """`num_bytes` of memory at `address` of a device, or of the host."""

    device: int
    address: int
    num_bytes: int

    def part(self, start: int, num_bytes: int) -> "Region":
        """Raises DeviceError where that is not all inside."""
        if start < 0 or num_bytes < 0 or start + num_bytes > self.num_bytes:
            raise DeviceError(
                f"bytes {start} to {start + num_bytes} lie outside a region of {self.num_bytes}"
            )
        return Region(self.device, self.address + start, num_bytes)


@dataclass(frozen=True, slots=True)
class Copy:
    """Two regions of one size, each on a device or on the host."""

    destination: Region
    source: Region


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversion:
    """Vectors that lie scattered, to be put one behind the other and stored as `target` stores them."""

    source: KVLayout
    target: KVLayout
    data: Region
    """Where the vectors lie, from the 0th on."""
    scales: Region | None
    """Where their scales lie, from the 0th on, if they have any."""
    runs: npt.NDArray[np.int64]
    """(runs, 2): the number of a run's first vector, and how many there are."""
    packed: Region
    packed_scales: Region | None
    """None where the target has none."""

    def data_parts(self) -> list[Region]:
        """Return what is read of the vectors, in order."""
        return self._parts(self.data, self.source.vector_bytes)

    def scale_parts(self) -> list[Region]:
        return self._parts(self.scales, self.source.scale_bytes) if self.scales is not None else []

    def written(self) -> list[Region]:
        return [self.packed, *([self.packed_scales] if self.packed_scales is not None else [])]

    def _parts(self, whole: Region, item_bytes: int) -> list[Region]:
        return [whole.part(first * item_bytes, count * item_bytes) for first, count in self.runs.tolist()]


class Event(Protocol):
    def query(self) -> bool:
        """Is all work done that was on the stream before it? Does not block. Raises DeviceError for work that failed."""
        ...


class DeviceStream(Protocol):
    """For any thread. Nothing but `close` blocks."""

    def copy(self, copies: Sequence[Copy]) -> None:
        """Raises DeviceError."""
        ...

    def convert(self, work: Conversion) -> None:
        """Raises DeviceError."""
        ...

    def uses(self, reads: Iterable[Region], writes: Iterable[Region]) -> None:
        """Say what work that others put on this stream next touches. Only a simulated device asks for the regions."""
        ...

    def record(self) -> Event: ...
    def wait(self, event: Event) -> None:
        """What comes after this on the stream waits for `event`, which may be of another stream."""
        ...

    def close(self) -> None:
        """Returns when all its work is done."""
        ...


class ComputeDevice(Protocol):
    """Methods are for any thread and raise DeviceError for what the device refuses."""

    @property
    def number(self) -> int: ...
    @property
    def asks_for_uses(self) -> bool:
        """Whether `DeviceStream.uses` does anything."""
        ...

    @property
    def compute(self) -> DeviceStream:
        """The stream that models compute on."""
        ...

    def stream(self, name: str) -> DeviceStream:
        """A new one. `name`: for people."""
        ...

    def allocate(self, num_bytes: int) -> Region:
        """Memory of the device, zeroed when this returns."""
        ...

    def pinned(self, num_bytes: int) -> Region:
        """Memory of the host that the device copies to and from by itself, zeroed."""
        ...

    def free(self, region: Region) -> None:
        """Give back what `allocate` or `pinned` returned."""
        ...

    def host_view(self, region: Region, *, write: bool) -> memoryview:
        """For the host to read, or to write, at once. Raises DeviceError for memory that the host cannot reach."""
        ...

    def array(self, region: Region) -> object:
        """What `torch.as_tensor` makes a tensor of, of bytes, without a copy."""
        ...


class SharesMemory(Protocol):
    """A device that processes of one host can share memory of."""

    def export(self, region: Region) -> tuple[bytes, int]:
        """A handle of the allocation that the region lies in, and how far into it the region begins."""
        ...

    def open(self, handle: bytes, num_bytes: int) -> Region:
        """The first bytes of another process's allocation, which lives for as long as it is open here."""
        ...

    def shut(self, region: Region) -> None:
        """Give back what `open` returned."""
        ...


class SharingDevice(ComputeDevice, SharesMemory, Protocol): ...


DeviceOf = Callable[[str], SharingDevice]
"""(name, as torch says it) -> the device. Raises ConfigError."""
