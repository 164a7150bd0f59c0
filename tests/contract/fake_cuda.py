"""A stand-in for the CUDA driver: device memory is a file in /dev/shm, a handle is its name, a mapping is a mapping."""

import ctypes
import mmap
import os
import uuid
from collections.abc import Sequence
from pathlib import Path

from core.errors import TransferError


class FakeDriver:
    """kvtransfer.transport.cuda_ipc.Driver, in which addresses are real and copies are memmove."""

    def __init__(self) -> None:
        self._allocations: dict[int, tuple[str, int]] = {}
        self._maps: dict[int, mmap.mmap] = {}

    def allocate(self, num_bytes: int) -> int:
        path = f"/dev/shm/fake-cuda-{os.getpid()}-{uuid.uuid4().hex}"
        with Path(path).open("w+b") as file:
            file.truncate(num_bytes)
        address = self._map(path)
        self._allocations[address] = (path, num_bytes)
        return address

    def view(self, address: int) -> memoryview:
        return memoryview(self._maps[address])

    def free_all(self) -> None:
        for path, _ in self._allocations.values():
            Path(path).unlink(missing_ok=True)

    def export(self, address: int) -> tuple[bytes, int]:
        for base, (path, size) in self._allocations.items():
            if base <= address < base + size:
                return path.encode(), address - base
        raise TransferError("cuIpcGetMemHandle: CUDA_ERROR_INVALID_VALUE")

    def map(self, handle: bytes) -> int:
        return self._map(handle.decode())

    def unmap(self, address: int) -> None:
        del self._maps[address]

    def copy(self, copies: Sequence[tuple[int, int, int]]) -> None:
        for target, source, num_bytes in copies:
            ctypes.memmove(target, source, num_bytes)

    def _map(self, path: str) -> int:
        try:
            with Path(path).open("r+b") as file:
                mapped = mmap.mmap(file.fileno(), 0)
        except OSError as error:
            raise TransferError("cuIpcOpenMemHandle: CUDA_ERROR_INVALID_HANDLE") from error
        address = ctypes.addressof(ctypes.c_char.from_buffer(mapped))
        self._maps[address] = mapped
        return address
