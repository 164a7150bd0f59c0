"""Files of packed matrices. Processes that map one for reading have one copy of it in memory among them.

A file has a head, then the content of mappings, each from a multiple of 2 MiB on, and then an index in JSON. The head is written
last. Content is compared with its sums whenever a file is mapped, so that no half-written or damaged one is believed."""

import ctypes
import json
import mmap
import os
import struct
import zlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from device.host_memory import address_of
from kernels.cpu.pages import Arena, PageMapping, mapped

Entry = Mapping[str, Any]
"""What an index says of one matrix, for whoever has written it."""

_HEAD: Final = struct.Struct("<8sQQI")
"""The magic, where the index begins, its size, and its CRC-32."""
_MAGIC: Final = b"batonwt1"
_ALIGNED, _PAGE, _PIECE = 2 << 20, mmap.PAGESIZE, 16 << 20
_LARGE_PAGES: Final = Path("/sys/kernel/mm/transparent_hugepage/enabled")
_POPULATE_READ: Final = 22
"""MADV_POPULATE_READ, from Linux 5.14 on: it fails where touching a page would end the process."""
_MAP_FIXED: Final = 0x10
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (
    *(ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int),
    *(ctypes.c_int, ctypes.c_int, ctypes.c_int64),
)


class DamagedFile(Exception):
    """The file is not what was written; the text says why."""


class OpenFile:
    """A descriptor that is closed with its last user."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor

    def __del__(self, close: Callable[[int], None] = os.close) -> None:
        close(self.descriptor)


@dataclass(frozen=True, slots=True)
class Piece:
    """Where a matrix is stored."""

    mapping: int
    at: int
    num_bytes: int


class KeptArena(Arena):
    """Memory of matrices that may become a file's."""

    def __init__(self, on_growth: Callable[[], None] = lambda: None) -> None:
        super().__init__()
        self._mappings, self._used = list[PageMapping](), list[int]()
        self._on_growth = on_growth

    @property
    def num_bytes(self) -> int:
        return sum(self._used)

    def kept(self, tensor: Tensor) -> Piece | None:
        """Return where a tensor, which the file will have, is stored; None where that is elsewhere."""
        start = tensor.data_ptr()
        for number, memory in enumerate(self._mappings):
            at = start - address_of(memoryview(memory))
            if 0 <= at < len(memory):
                end = -(-(at + tensor.nbytes) // _PAGE) * _PAGE
                self._used[number] = max(self._used[number], end)
                return Piece(number, at, tensor.nbytes)
        return None

    def copied(self, tensor: Tensor) -> Tensor:
        """Return (bytes,) uint8: the tensor's content, in this memory."""
        content = tensor.contiguous().flatten().view(torch.uint8)
        return torch.frombuffer(self.take(content.numel()), dtype=torch.uint8).copy_(content)

    def become(self, file: OpenFile, entries: Sequence[Entry]) -> None:
        """Write the file, and have it take the place of the memory, piece by piece: what points there finds the same bytes.
        Raises OSError; what was written before then stays the file's."""
        starts = _starts(self._used)
        for start, used in zip(starts, self._used, strict=False):
            if used:
                os.posix_fallocate(
                    file.descriptor, start, used
                )  # the file is complete, or has no room at once
        sums: list[int] = []
        for memory, start, used in zip(self._mappings, starts, self._used, strict=False):
            if used:
                _write(file.descriptor, memoryview(memory)[:used], start)
                sums.append(_sum_of(memory, used))
                _map_over(memory, file, start, used)
                self._on_growth()
            else:
                sums.append(0)
        _write_index(
            file.descriptor, starts[-1], {"used": self._used, "sums": sums, "entries": list(entries)}
        )

    def _mapping(self, num_bytes: int) -> PageMapping:
        memory = mapped(num_bytes)
        self._mappings.append(memory)
        self._used.append(0)
        self._on_growth()
        return memory


class MappedFile:
    """A file's matrices, for reading."""

    def __init__(self, file: OpenFile) -> None:
        """Map all of it, and compare it with its sums. Raises DamagedFile and OSError."""
        index = _read_index(file.descriptor)
        used: list[int] = index["used"]
        self.entries: list[Entry] = index["entries"]
        self._mappings = [
            _mapped_part(file, start, part) for start, part in zip(_starts(used), used, strict=False)
        ]
        for memory, part, wanted in zip(self._mappings, used, index["sums"], strict=True):
            if part and _sum_of(memory, part) != wanted:
                raise DamagedFile("its content is not what was written")

    def tensor(self, piece: Piece) -> Tensor:
        """Return (bytes,) uint8. Writing to it ends the process."""
        whole = memoryview(self._mappings[piece.mapping])
        return torch.frombuffer(whole[piece.at : piece.at + piece.num_bytes], dtype=torch.uint8)


@cache
def maps_large_pages(folder: Path) -> bool:
    """Return whether files there are mapped in pages as large as those of private memory: products with matrices in pages of
    4 KiB take up to 1.9 times as long. Raises OSError."""
    with suppress(OSError):
        if "[never]" in _LARGE_PAGES.read_text():
            return True  # there are none in private memory either
    file = OpenFile(os.open(folder, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600))
    _write(file.descriptor, memoryview(bytes(2 * _ALIGNED)), 0)
    memory = _mapped_part(file, 0, 2 * _ALIGNED)
    lines = iter(Path("/proc/self/smaps").read_text().splitlines())
    address = f"{address_of(memoryview(memory)):x}-"
    for line in lines:
        if line.startswith(address):
            found = next((each for each in lines if each.startswith("FilePmdMapped")), "none 0 kB")
            return int(found.split()[1]) << 10 >= _ALIGNED
    return False


def _starts(used: Sequence[int]) -> list[int]:
    """Return where each mapping begins in the file, and where the last one ends."""
    starts = [_ALIGNED]
    for part in used:
        starts.append(starts[-1] + -(-part // _ALIGNED) * _ALIGNED)
    return starts


def _write(descriptor: int, content: memoryview, at: int) -> None:
    while content:
        written = os.pwrite(descriptor, content[:_PIECE], at)
        content, at = content[written:], at + written


def _write_index(descriptor: int, at: int, index: Mapping[str, Any]) -> None:
    content = json.dumps(index).encode()
    _write(descriptor, memoryview(content), at)
    _write(descriptor, memoryview(_HEAD.pack(_MAGIC, at, len(content), zlib.crc32(content))), 0)


def _read_index(descriptor: int) -> dict[str, Any]:
    head = os.pread(descriptor, _HEAD.size, 0)
    if len(head) < _HEAD.size:
        raise DamagedFile("it has no head")
    magic, at, num_bytes, crc = _HEAD.unpack(head)
    size = os.fstat(descriptor).st_size
    if magic != _MAGIC or at + num_bytes > size:
        raise DamagedFile(f"its head is wrong, or its {size} bytes are too few")
    content = os.pread(descriptor, num_bytes, at)
    if zlib.crc32(content) != crc:
        raise DamagedFile("its index is not what was written")
    return json.loads(content)


def _mapped_part(file: OpenFile, start: int, num_bytes: int) -> PageMapping:
    memory = mapped(max(-(-num_bytes // _ALIGNED), 1) * _ALIGNED)
    if num_bytes:
        _map_over(memory, file, start, num_bytes)
    return memory


def _map_over(memory: PageMapping, file: OpenFile, start: int, num_bytes: int) -> None:
    """Put a part of the file in the place of the memory's first bytes. Raises OSError."""
    address = address_of(memoryview(memory))
    flags = mmap.MAP_SHARED | _MAP_FIXED
    found = _libc.mmap(address, num_bytes, mmap.PROT_READ, flags, file.descriptor, start)
    if found != address:
        raise OSError(ctypes.get_errno(), f"cannot map it: {os.strerror(ctypes.get_errno())}")
    memory.holds = file
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # a system that was built without them
            memory.madvise(mmap.MADV_HUGEPAGE, 0, num_bytes)
    try:
        memory.madvise(_POPULATE_READ, 0, num_bytes)
    except OSError as error:
        if not _is_unknown(error):
            raise


def _is_unknown(error: OSError) -> bool:
    """Return whether the system has no such advice."""
    return error.errno == 22


def _sum_of(memory: PageMapping, num_bytes: int) -> int:
    """Return the sum of its words, modulo 2**64."""
    return int(torch.frombuffer(memory, dtype=torch.int64, count=num_bytes // 8).sum())
