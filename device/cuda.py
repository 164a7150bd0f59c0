"""NVIDIA's GPUs, through cupy's bindings of the CUDA runtime (`cupy.cuda.runtime`), in the context that torch uses.

Written against cupy 14's signatures. Its tests run on a stand-in for them, and on a GPU where there is one."""

import contextlib
import importlib
import importlib.util
import logging
import threading
from collections.abc import Callable, Generator, Iterable, Sequence
from functools import cached_property
from typing import Any

import numpy as np

from core.errors import ConfigError, DeviceError, OutOfMemory
from device import many_conversions, many_copies
from device.array_interface import CudaBytes
from device.host_memory import view_of
from device.many_conversions import ManyConversions
from device.many_copies import Launch, ManyCopies
from device.seam import HOST, Conversion, Copy, Event, Region

log = logging.getLogger(__name__)

_SUCCESS, _NO_MEMORY, _NOT_READY = 0, 2, 600
_LOSES_ALL = frozenset({700, 702, 710, *range(714, 720)})
"""What a kernel did, such as reading where it must not, after which CUDA refuses everything in this process."""
_HANDLE_BYTES = 64
_DEFAULT_STREAM = 0
"""The stream that torch launches on where nobody chooses another."""


_INSTALL_CUPY = "pip install cupy-cuda13x, or cupy-cuda12x for a torch of CUDA 12"


def has_cupy() -> bool:
    return importlib.util.find_spec("cupy") is not None


def check_cupy() -> None:
    """Raise ConfigError where cupy is not installed."""
    if not has_cupy():
        raise ConfigError(
            f"Baton reaches GPUs through cupy, which is not installed: {_INSTALL_CUPY}, or set engine.device to cpu"
        )


def load_runtime() -> Any:
    """Raises ConfigError where cupy is missing or cannot be loaded."""
    try:
        return importlib.import_module("cupy.cuda.runtime")
    except ImportError as error:
        raise ConfigError(
            f"CUDA is reached through cupy, which cannot be imported ({error}): {_INSTALL_CUPY}"
        ) from error


Load = Callable[[str, str], Launch]
"""(source, name) -> a kernel of CUDA C++, compiled for the calling thread's device."""


def load_launch(source: str, name: str) -> Launch:
    """Raises what cupy raises where it cannot compile."""
    cupy = importlib.import_module("cupy")
    # Fractions in hexadecimal are of this standard, and cupy's own choice is an older one.
    kernel = cupy.RawKernel(source, name, options=("-std=c++17",))
    kernel.compile()

    def launch(programs: int, threads: int, arguments: Sequence[np.generic], stream: int) -> None:
        with cupy.cuda.ExternalStream(stream):
            kernel((programs,), (threads,), tuple(arguments))

    return launch


class CudaEvent:
    def __init__(self, device: "CudaDevice", stream: int) -> None:
        self._device = device
        self.handle: int = 0
        self.handle = device.call("eventCreateWithFlags", device.runtime.eventDisableTiming)
        device.call("eventRecord", self.handle, stream)

    def query(self) -> bool:
        code = self._device.call("eventQuery", self.handle)
        if code not in (_SUCCESS, _NOT_READY):
            raise DeviceError(f"work on CUDA device {self._device.number} failed with error {code}")
        return code == _SUCCESS

    def __del__(self) -> None:
        self._device.give_back_event(self.handle)


class CudaStream:
    def __init__(self, device: "CudaDevice", handle: int) -> None:
        self._device, self.handle = device, handle

    def copy(self, copies: Sequence[Copy]) -> None:
        for copy in copies:
            if copy.source.num_bytes != copy.destination.num_bytes:
                raise DeviceError(f"a copy of {copy.source.num_bytes} bytes to {copy.destination.num_bytes}")
        if ManyCopies.takes(copies):
            # cupy launches on the calling thread's device.
            self._device.call("setDevice", self._device.number)
            if (many := self._device.many_copies) is not None:
                many.copy(copies, self.handle, self.record)
                return
        kind = self._device.runtime.memcpyDefault
        for copy in copies:
            to, source = copy.destination.address, copy.source.address
            self._device.call("memcpyAsync", to, source, copy.source.num_bytes, kind, self.handle)

    def convert(self, work: Conversion) -> None:
        # cupy launches on the calling thread's device.
        self._device.call("setDevice", self._device.number)
        self._device.many_conversions.convert(work, self.handle, self.record)

    def uses(self, reads: Iterable[Region], writes: Iterable[Region]) -> None:
        """Nothing to do."""

    def record(self) -> CudaEvent:
        return CudaEvent(self._device, self.handle)

    def wait(self, event: Event) -> None:
        assert isinstance(event, CudaEvent)
        self._device.call("streamWaitEvent", self.handle, event.handle)

    def close(self) -> None:
        if self.handle != _DEFAULT_STREAM:
            with self._device.giving_back():
                # No step comes after this, so the host may wait.
                self._device.call("streamSynchronize", self.handle)
                self._device.call("streamDestroy", self.handle)


class CudaDevice:
    """device.seam.SharingDevice."""

    asks_for_uses = False

    def __init__(self, number: int, runtime: Any = None, load: Load = load_launch) -> None:
        """`runtime` and `load`: in place of cupy's. Raises ConfigError without cupy, a driver or this device."""
        self.runtime = runtime or load_runtime()
        self.number = number
        self._thread = threading.local()
        self._allocated: dict[int, int] = {}
        self._load = load
        self._is_lost = False
        try:
            self.call("getDeviceCount")
        except DeviceError as error:
            raise ConfigError(f"there is no CUDA device {number} here: {error}") from error
        self.compute = CudaStream(self, _DEFAULT_STREAM)

    def stream(self, name: str) -> CudaStream:
        return CudaStream(self, self.call("streamCreateWithFlags", self.runtime.streamNonBlocking))

    def allocate(self, num_bytes: int) -> Region:
        address = self.call("malloc", num_bytes)
        # On a stream of its own, and over when this returns: zeros that wait for the model's work would overwrite what another
        # stream has put there meanwhile.
        self.call("memsetAsync", address, 0, num_bytes, self._zeroing)
        self.call("streamSynchronize", self._zeroing)
        self._allocated[address] = num_bytes
        return Region(self.number, address, num_bytes)

    def pinned(self, num_bytes: int) -> Region:
        region = Region(HOST, self.call("hostAlloc", num_bytes, self.runtime.hostAllocPortable), num_bytes)
        view_of(region.address, num_bytes)[:] = bytes(num_bytes)
        return region

    def free(self, region: Region) -> None:
        self._allocated.pop(region.address, None)
        with self.giving_back():
            self.call("freeHost" if region.device == HOST else "free", region.address)

    def host_view(self, region: Region, *, write: bool) -> memoryview:
        if region.device != HOST:
            raise DeviceError(f"the host cannot reach memory of CUDA device {region.device}")
        return view_of(region.address, region.num_bytes)

    def array(self, region: Region) -> object:
        return CudaBytes(region.address, region.num_bytes)

    def export(self, region: Region) -> tuple[bytes, int]:
        for address, num_bytes in list(self._allocated.items()):
            if address <= region.address < address + num_bytes:
                return bytes(self.call("ipcGetMemHandle", address)), region.address - address
        raise DeviceError("only memory that was allocated here can be shared with other processes")

    def open(self, handle: bytes, num_bytes: int) -> Region:
        if len(handle) != _HANDLE_BYTES:
            raise DeviceError(f"a CUDA IPC handle has {_HANDLE_BYTES} bytes, not {len(handle)}")
        return Region(self.number, self.call("ipcOpenMemHandle", handle), num_bytes)

    def shut(self, region: Region) -> None:
        self.call("ipcCloseMemHandle", region.address)

    @cached_property
    def _zeroing(self) -> int:
        return self.call("streamCreateWithFlags", self.runtime.streamNonBlocking)

    @cached_property
    def many_copies(self) -> ManyCopies | None:
        """None where the kernel cannot be compiled: short copies are made one by one then."""
        try:
            return ManyCopies(self, self._load(many_copies.SOURCE, many_copies.NAME))
        except Exception as error:  # cupy's are of many kinds where NVRTC or its headers are missing
            log.warning("CUDA device %d: short copies are made one by one, since %s", self.number, error)
            return None

    @cached_property
    def many_conversions(self) -> ManyConversions:
        """Raises DeviceError where the kernel cannot be compiled."""
        try:
            return ManyConversions(self, self._load(many_conversions.SOURCE, many_conversions.NAME))
        except Exception as error:  # cupy's are of many kinds where NVRTC or its headers are missing
            raise DeviceError(f"KV cannot be converted on CUDA device {self.number}: {error}") from error

    def call(self, name: str, *arguments: Any) -> Any:
        """Call the runtime, with this device as the calling thread's. Raises DeviceError."""
        try:
            if not getattr(self._thread, "entered", False):
                self.runtime.setDevice(self.number)
                self._thread.entered = True
            return getattr(self.runtime, name)(*arguments)
        except self.runtime.CUDARuntimeError as error:
            self._is_lost = self._is_lost or error.status in _LOSES_ALL
            kind = OutOfMemory if error.status == _NO_MEMORY else DeviceError
            raise kind(f"{name}: {error}") from error

    @contextlib.contextmanager
    def giving_back(self) -> Generator[None]:
        """Raise nothing where the device is lost: all is lost with it, and those who computed have been told why."""
        try:
            yield
        except DeviceError:
            if not self._is_lost:
                raise

    def give_back_event(self, handle: int) -> None:
        """When nobody refers to it any more, which may be as the process ends."""
        try:
            self.runtime.eventDestroy(handle)
        except Exception:  # the driver is gone, and the event with it
            return


def cuda_device(name: str) -> CudaDevice:
    """Return the device that torch gives this name: `cuda`, `cuda:0` and so on. Raises ConfigError."""
    return CudaDevice(int(name.partition(":")[2] or 0))
