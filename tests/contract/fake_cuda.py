"""A stand-in for `cupy.cuda.runtime`: device memory is a file in /dev/shm, a handle is its name, a mapping is a mapping."""

import ctypes
import itertools
import mmap
import os
import uuid
from collections.abc import Callable
from pathlib import Path


class CUDARuntimeError(RuntimeError):
    def __init__(self, status: int, message: str) -> None:
        self.status = status
        super().__init__(message)


class FakeRuntime:
    """What `device.cuda.CudaDevice` calls, with cupy's signatures. Addresses are real, and all work is done as it is launched,
    but for that of the default stream while that is `busy`."""

    CUDARuntimeError = CUDARuntimeError
    memcpyDefault = 4
    hostAllocPortable = 1
    streamNonBlocking = 1
    eventDisableTiming = 2

    def __init__(self) -> None:
        self._paths: dict[int, str] = {}
        self._maps: dict[int, mmap.mmap] = {}
        self._numbers = itertools.count(1)
        self.open_events: set[int] = set()
        self.open_streams: set[int] = set()
        self.failed = 0
        """What events say of their work: an error's number."""
        self.largest = 1 << 30
        """The most bytes that it allocates."""
        self.busy = False
        self._waiting: list[Callable[[], object]] = []

    def view(self, address: int) -> memoryview:
        return memoryview(self._maps[address])

    def end_step(self) -> None:
        """The default stream goes on with what waits there."""
        self.busy = False
        for work in self._waiting:
            work()
        self._waiting.clear()

    def free_all(self) -> None:
        for path in self._paths.values():
            Path(path).unlink(missing_ok=True)

    def getDeviceCount(self) -> int:
        return 1

    def setDevice(self, device: int) -> None:
        if device:
            raise CUDARuntimeError(101, "cudaErrorInvalidDevice: invalid device ordinal")

    def malloc(self, size: int) -> int:
        if size > self.largest:
            raise CUDARuntimeError(2, "cudaErrorMemoryAllocation: out of memory")
        path = f"/dev/shm/fake-cuda-{os.getpid()}-{uuid.uuid4().hex}"
        with Path(path).open("w+b") as file:
            file.truncate(size)
        address = self._map(path)
        self._paths[address] = path
        return address

    def free(self, ptr: int) -> None:
        Path(self._paths.pop(ptr)).unlink()
        del self._maps[ptr]

    def hostAlloc(self, size: int, flags: int) -> int:
        return self.malloc(size)

    def freeHost(self, ptr: int) -> None:
        self.free(ptr)

    def memset(self, ptr: int, value: int, size: int) -> None:
        self.memsetAsync(ptr, value, size, 0)

    def memsetAsync(self, ptr: int, value: int, size: int, stream: int) -> None:
        self._do(stream, lambda: ctypes.memset(ptr, value, size))

    def memcpyAsync(self, dst: int, src: int, size: int, kind: int, stream: int) -> None:
        self._do(stream, lambda: ctypes.memmove(dst, src, size))

    def streamCreateWithFlags(self, flags: int) -> int:
        stream = next(self._numbers)
        self.open_streams.add(stream)
        return stream

    def streamSynchronize(self, stream: int) -> None:
        assert stream in self.open_streams

    def streamDestroy(self, stream: int) -> None:
        self.open_streams.remove(stream)

    def streamWaitEvent(self, stream: int, event: int, flags: int = 0) -> None:
        assert event in self.open_events

    def eventCreateWithFlags(self, flags: int) -> int:
        event = next(self._numbers)
        self.open_events.add(event)
        return event

    def eventDestroy(self, event: int) -> None:
        self.open_events.remove(event)

    def eventRecord(self, event: int, stream: int) -> None:
        assert event in self.open_events

    def eventQuery(self, event: int) -> int:
        assert event in self.open_events
        return self.failed

    def ipcGetMemHandle(self, devPtr: int) -> bytes:
        return self._paths[devPtr].encode().ljust(64, b"\0")

    def ipcOpenMemHandle(self, handle: bytes, flags: int = 1) -> int:
        return self._map(handle.rstrip(b"\0").decode())

    def ipcCloseMemHandle(self, devPtr: int) -> None:
        del self._maps[devPtr]

    def _do(self, stream: int, work: Callable[[], object]) -> None:
        if self.busy and not stream:
            self._waiting.append(work)
        else:
            work()

    def _map(self, path: str) -> int:
        try:
            with Path(path).open("r+b") as file:
                mapped = mmap.mmap(file.fileno(), 0)
        except OSError as error:
            raise CUDARuntimeError(400, "cudaErrorInvalidResourceHandle: invalid resource handle") from error
        address = ctypes.addressof(ctypes.c_char.from_buffer(mapped))
        self._maps[address] = mapped
        return address
