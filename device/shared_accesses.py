"""Memory of a simulated device that several processes have, and the log of what they do with it.

Both are files without a name: the kernel drops them with the last process that has them, however that ends. As with threads, the
hosts of all these processes count as one: what one of them has seen done is done for whatever another one gives a stream. So the
log finds work that no host has waited for, and takes it for granted that processes tell each other in time."""

import fcntl
import mmap
import os
import weakref
from collections.abc import Generator
from contextlib import contextmanager

import numpy as np

from core.errors import DeviceError
from device.happens_before import AccessLog

HANDLE_BYTES = 64
"""As many as a handle of CUDA has."""
_MOST_ACTORS = 64
_HEAD = 1 + 2 * _MOST_ACTORS
"""Numbers before the marks: how many actors there are, their names, and how far the hosts have seen each."""


class SharedLog(AccessLog):
    """An AccessLog in a file. All but the constructor is to be called within `held`."""

    def __init__(self, descriptor: int, num_bytes: int) -> None:
        super().__init__(num_bytes)
        size = _HEAD * 8 + 2 * _MOST_ACTORS * self.num_granules * 4
        if os.fstat(descriptor).st_size < size:
            os.ftruncate(descriptor, size)
        mapped = mmap.mmap(descriptor, size)
        weakref.finalize(mapped, os.close, descriptor)
        self._head = np.frombuffer(mapped, np.int64, _HEAD)
        marks = np.frombuffer(mapped, np.int32, offset=_HEAD * 8)
        self._marks = marks.reshape(2, _MOST_ACTORS, self.num_granules)
        self._descriptor = descriptor
        self.number = os.fstat(descriptor).st_ino
        """Processes that hold several logs take them in this order."""

    @contextmanager
    def held(self) -> Generator[None]:
        """Keep the other processes away. The kernel ends it with a process."""
        fcntl.flock(self._descriptor, fcntl.LOCK_EX)
        try:
            for place in range(len(self.writes), int(self._head[0])):
                self._take(place)
            yield
        finally:
            fcntl.flock(self._descriptor, fcntl.LOCK_UN)

    def adopt(self, log: AccessLog) -> None:
        """Go on from what another log of the same bytes has."""
        for own, other in ((self.writes, log.writes), (self.reads, log.reads)):
            for actor, ticks in other.items():
                self.marks_of(own, actor)[:] = ticks

    def seen(self) -> dict[int, int]:
        """Return how much of each actor's work the hosts have seen done."""
        return {actor: int(self._head[1 + _MOST_ACTORS + place]) for place, actor in enumerate(self.writes)}

    def see(self, ticks: dict[int, int]) -> None:
        """Note what a host has seen done. Actors that have never touched these bytes do not matter."""
        for place, actor in enumerate(self.writes):
            at = 1 + _MOST_ACTORS + place
            self._head[at] = max(self._head[at], ticks.get(actor, 0))

    def marks_of(self, marks: dict[int, np.ndarray], actor: int) -> np.ndarray:
        if actor not in marks:
            place = int(self._head[0])
            if place == _MOST_ACTORS:
                raise DeviceError(f"{_MOST_ACTORS} streams and hosts have used one simulated allocation")
            self._head[1 + place], self._head[0] = actor, place + 1
            self._take(place)
        return marks[actor]

    def _take(self, place: int) -> None:
        actor = int(self._head[1 + place])
        self.writes[actor], self.reads[actor] = self._marks[0, place], self._marks[1, place]


def share(content: np.ndarray, log: AccessLog) -> tuple[bytes, np.ndarray, SharedLog]:
    """Return a handle of memory with this content and this log's marks, that memory, and its log."""
    descriptors = [os.memfd_create(name) for name in ("baton-simulated-memory", "baton-simulated-accesses")]
    os.ftruncate(descriptors[0], max(1, len(content)))
    handle = ":".join(map(str, (os.getpid(), *descriptors))).encode().ljust(HANDLE_BYTES, b"\0")
    memory, shared = _mapped(descriptors[0], len(content)), SharedLog(descriptors[1], len(content))
    memory[:] = content
    with shared.held():
        shared.adopt(log)
    return handle, memory, shared


def open_shared(handle: bytes) -> tuple[np.ndarray, SharedLog]:
    """Return another process's memory, and its log. Raises DeviceError."""
    pid, *files = handle.rstrip(b"\0").decode().split(":")
    try:
        memory, accesses = (os.open(f"/proc/{pid}/fd/{file}", os.O_RDWR) for file in files)
    except (OSError, ValueError) as error:
        raise DeviceError(f"no simulated memory is behind the handle {handle!r}: {error}") from error
    num_bytes = os.fstat(memory).st_size
    return _mapped(memory, num_bytes), SharedLog(accesses, num_bytes)


def _mapped(descriptor: int, num_bytes: int) -> np.ndarray:
    mapped = mmap.mmap(descriptor, max(1, num_bytes))
    weakref.finalize(mapped, os.close, descriptor)
    return np.frombuffer(mapped, np.uint8, num_bytes)
