"""The native library of another architecture, which an emulator runs: with the face of the one that `ctypes` loads.

Both read the same inputs, from memory that both processes have at the same address. Each array ends with a page, and the other
machine may not touch the next one: a byte too far ends its process."""

import ctypes
import struct
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Self

import numpy as np

from kernels.cpu.library import SIGNATURES

_ADDRESS, _SIZE = 0x10_0000_0000, 256 << 20
_PAGE = 4096
_READ_WRITE, _SHARED, _FIXED_NOREPLACE = 3, 0x01, 0x100000
_FAILED = ctypes.c_void_p(-1).value


class SharedMemory:
    """Room for arrays and structures."""

    def __init__(self, path: Path) -> None:
        self.path = path
        libc = ctypes.CDLL(None, use_errno=True)
        libc.mmap.restype = ctypes.c_void_p
        with path.open("w+b") as file:
            file.truncate(_SIZE)
            about = ctypes.c_size_t(_SIZE), _READ_WRITE, _SHARED | _FIXED_NOREPLACE, file.fileno()
            at = libc.mmap(ctypes.c_void_p(_ADDRESS), *about, ctypes.c_long(0))
        assert at not in (None, _FAILED), f"no memory at {_ADDRESS:#x}: error {ctypes.get_errno()}"
        self._unmap: Callable[[], object] = lambda: libc.munmap(
            ctypes.c_void_p(_ADDRESS), ctypes.c_size_t(_SIZE)
        )
        self.forget()

    def forget(self) -> None:
        """Free all of it for others."""
        self._next = _ADDRESS
        self.guards: list[int] = []
        """Addresses of pages behind arrays."""

    def close(self) -> None:
        self._unmap()

    def room(self, shape: Sequence[int] | int, kind: Any) -> np.ndarray:
        """Zeros."""
        kind = np.dtype(kind)
        num_bytes = int(np.prod(shape)) * kind.itemsize
        found = np.ctypeslib.as_array((ctypes.c_uint8 * num_bytes).from_address(self._take(num_bytes)))
        found[:] = 0
        return found.view(kind).reshape(shape)

    def put(self, array: np.ndarray) -> np.ndarray:
        found = self.room(array.shape, array.dtype)
        found[...] = array
        return found

    def structures(self, values: Sequence[ctypes.Structure]) -> int:
        """Return where they are, one behind the other."""
        found = self._take(sum(map(ctypes.sizeof, values)))
        for i, value in enumerate(values):
            ctypes.memmove(found + i * ctypes.sizeof(value), ctypes.byref(value), ctypes.sizeof(value))
        return found

    def _take(self, num_bytes: int) -> int:
        end = self._next + -(-num_bytes // _PAGE) * _PAGE
        assert end + _PAGE <= _ADDRESS + _SIZE, "shared memory is full"
        self._next = end + _PAGE
        self.guards.append(end)
        return end - num_bytes


class OtherMachine:
    """A library whose functions `calls` (arm_calls.cpp), run by `emulator`, calls."""

    def __init__(self, emulator: Sequence[str], calls: Path, library: Path, memory: SharedMemory) -> None:
        command = [*emulator, str(calls), str(library), str(memory.path), str(_ADDRESS), str(_SIZE)]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
        )
        self._memory, self._guards = memory, list[int]()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.communicate()

    def __getattr__(self, name: str) -> Callable[..., Any]:
        result, kinds = SIGNATURES[name]

        def call(*given: Any) -> Any:
            assert len(given) == len(kinds), name
            whole = [
                str(int(one or 0)) for one, kind in zip(given, kinds, strict=True) if kind != ctypes.c_float
            ]
            floats = [
                str(struct.unpack("<I", struct.pack("<f", one))[0])
                for one, kind in zip(given, kinds, strict=True)
                if kind == ctypes.c_float
            ]
            self._guard()
            returned = self._call(name, whole, floats)
            return None if result is None else result(returned).value

        return call

    def _guard(self) -> None:
        if self._guards is not self._memory.guards:
            self._call("mprotect", [str(_ADDRESS), str(_SIZE), str(_READ_WRITE)])
            self._guards, self._guarded = self._memory.guards, 0
        for page in self._guards[self._guarded :]:
            assert self._call("mprotect", [str(page), str(_PAGE), "0"]) == 0
        self._guarded = len(self._guards)

    def _call(self, name: str, whole: Sequence[str], floats: Sequence[str] = ()) -> int:
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None
        assert stdout is not None
        stdin.write(" ".join([name, *whole, "|", *floats]) + "\n")
        stdin.flush()
        said = stdout.readline()
        assert said, f"{name} ended the process with {self._process.wait(10)}"
        return int(said)
