"""CUDA IPC within a node: the holder maps the writer's pool into its own address space and copies from there, over NVLink, PCIe.

The writer exports its pool once for each holder; the holder's copies run on a stream of its own. As in every transport of
`kvtransfer/transport/pull.py` only the holder writes the holder's pool, so the fence waits for the holder's own stream and needs
no word from the writer. The driver keeps exported memory alive for as long as it is mapped.

Uses the driver (libcuda) alone. Its calls follow the CUDA driver API's documentation; they have not been run on a GPU."""

import ctypes
import threading
from collections.abc import Sequence
from typing import Any, Protocol

import msgpack

from core.errors import ConfigError, TransferError
from kvtransfer.copies import CopyRun
from kvtransfer.transport.pull import SCRATCH_BYTES, Exchange
from kvtransfer.transport.shm import host_id

_HANDLE_BYTES = 64
_LAZY_PEER_ACCESS = 1
Copy = tuple[int, int, int]
"""(destination address, source address, bytes)."""


class Driver(Protocol):
    """The calls of the CUDA driver that are needed, for one device and any thread. Methods raise TransferError."""

    def allocate(self, num_bytes: int) -> int: ...
    def export(self, address: int) -> tuple[bytes, int]:
        """Return a handle of the allocation that `address` lies in, and how far into it that is."""
        ...

    def map(self, handle: bytes) -> int: ...
    def unmap(self, address: int) -> None: ...
    def copy(self, copies: Sequence[Copy]) -> None:
        """Make the copies. Returns when all are done."""
        ...


class CudaIpcMedium:
    name = "cuda_ipc"
    memory = None
    needs_go = False

    def __init__(self, driver: Driver, address: int, num_bytes: int) -> None:
        """Serves the pool of `num_bytes` at `address` on the driver's device."""
        self.driver, self.address, self.num_bytes = driver, address, num_bytes
        self.host = host_id()
        self.scratch = driver.allocate(SCRATCH_BYTES)

    def take(self, exchange: Exchange) -> "_CudaIntake":
        offer: Any = msgpack.unpackb(exchange.recv())
        handle, offset, num_bytes = offer
        try:
            mapped = self.driver.map(handle)
        except TransferError as error:
            exchange.send(str(error).encode())
            raise
        exchange.send(b"")
        return _CudaIntake(self, mapped, offset, num_bytes)

    def give(self, exchange: Exchange) -> "_CudaOutlet":
        handle, offset = self.driver.export(self.address)
        exchange.send(msgpack.packb([handle, offset, self.num_bytes]))  # type: ignore[arg-type]
        if refusal := exchange.recv():
            raise TransferError(f"the holder cannot map this process's GPU memory: {refusal.decode()}")
        return _CudaOutlet()

    def close(self) -> None:
        """Do nothing: the driver takes everything back when the process ends."""


class _CudaOutlet:
    def supply(self, runs: Sequence[CopyRun], answered: threading.Event) -> None:
        """Do nothing: the holder copies by itself."""

    def close(self) -> None:
        """Do nothing: the holder unmaps."""


class _CudaIntake:
    def __init__(self, medium: CudaIpcMedium, mapped: int, offset: int, num_bytes: int) -> None:
        self._medium, self._mapped, self._offset, self._num_bytes = medium, mapped, offset, num_bytes
        self._lock = threading.Lock()
        """Held by a fetch from its first to its last touch of the pool."""
        self._aborted = self._closed = False

    def fetch(self, runs: Sequence[CopyRun], *, scratch: bool) -> None:
        if any(run.source + run.num_bytes > self._num_bytes for run in runs):
            raise TransferError("a run outside of the writer's pool")
        target = self._medium.scratch if scratch else self._medium.address
        source = self._mapped + self._offset
        with self._lock:
            if self._aborted:
                raise TransferError("the writer was cut off")
            self._medium.driver.copy(
                [(target + run.destination, source + run.source, run.num_bytes) for run in runs]
            )

    def abort(self) -> None:
        self._aborted = True
        with self._lock:  # a copy under way has ended: copies on this device do not wait for the writer
            pass

    def close(self) -> None:
        self.abort()
        if not self._closed:
            self._closed = True
            self._medium.driver.unmap(self._mapped)


class LibCuda:
    """`Driver` over libcuda, in the device's primary context (the one that torch uses)."""

    def __init__(self, device: int) -> None:
        """Open the driver. Raises ConfigError where there is no driver or no such device."""
        try:
            self._lib = ctypes.CDLL("libcuda.so.1")
        except OSError as error:
            raise ConfigError(
                "transfer.transport cuda_ipc needs an NVIDIA driver (libcuda.so.1); use auto, shm or tcp"
            ) from error
        self._context, self._stream = ctypes.c_void_p(), ctypes.c_void_p()
        number = ctypes.c_int()
        try:
            self._call("cuInit", 0)
            self._call("cuDeviceGet", ctypes.byref(number), device)
            self._call("cuDevicePrimaryCtxRetain", ctypes.byref(self._context), number)
            self._enter()
            self._call("cuStreamCreate", ctypes.byref(self._stream), 1)  # CU_STREAM_NON_BLOCKING
        except TransferError as error:
            raise ConfigError(f"transfer.transport cuda_ipc: no CUDA device {device}: {error}") from error

    def allocate(self, num_bytes: int) -> int:
        self._enter()
        address = ctypes.c_uint64()
        self._call("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(num_bytes))
        return address.value

    def export(self, address: int) -> tuple[bytes, int]:
        self._enter()
        base, size = ctypes.c_uint64(), ctypes.c_size_t()
        pointer = ctypes.c_uint64(address)
        self._call("cuMemGetAddressRange_v2", ctypes.byref(base), ctypes.byref(size), pointer)
        handle = _Handle()
        self._call("cuIpcGetMemHandle", ctypes.byref(handle), base)
        return bytes(handle.reserved), address - base.value

    def map(self, handle: bytes) -> int:
        self._enter()
        if len(handle) != _HANDLE_BYTES:
            raise TransferError(f"a CUDA IPC handle of {len(handle)} bytes")
        address = ctypes.c_uint64()
        packed = _Handle((ctypes.c_ubyte * _HANDLE_BYTES)(*handle))
        self._call("cuIpcOpenMemHandle_v2", ctypes.byref(address), packed, _LAZY_PEER_ACCESS)
        return address.value

    def unmap(self, address: int) -> None:
        self._enter()
        self._call("cuIpcCloseMemHandle", ctypes.c_uint64(address))

    def copy(self, copies: Sequence[Copy]) -> None:
        self._enter()
        try:
            for target, source, num_bytes in copies:
                self._call(
                    "cuMemcpyAsync",
                    ctypes.c_uint64(target),
                    ctypes.c_uint64(source),
                    ctypes.c_size_t(num_bytes),
                    self._stream,
                )
        finally:
            self._call("cuStreamSynchronize", self._stream)

    def _enter(self) -> None:
        self._call("cuCtxSetCurrent", self._context)

    def _call(self, name: str, *arguments: Any) -> None:
        code = getattr(self._lib, name)(*arguments)
        if code:
            text = ctypes.c_char_p()
            self._lib.cuGetErrorName(code, ctypes.byref(text))
            raise TransferError(f"{name}: {(text.value or b'error ' + str(code).encode()).decode()}")


class _Handle(ctypes.Structure):
    reserved: Any
    _fields_ = (("reserved", ctypes.c_ubyte * _HANDLE_BYTES),)
