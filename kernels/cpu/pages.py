"""Memory on large pages: for matrices, and for results that are made anew in each step. And what is free is given back."""

import mmap
import threading
import weakref
from collections.abc import Generator
from contextlib import contextmanager, suppress
from ctypes import CDLL
from math import prod

import torch
from torch import Tensor

_trim = getattr(CDLL(None), "malloc_trim", None)  # glibc's
_HUGE = getattr(mmap, "MADV_HUGEPAGE", None)
_HUGE_BYTES = 2 << 20
_TOGETHER_BYTES, _LEAST_BYTES, _LINE_BYTES = 64 << 20, 64 << 10, 64
"""The size of a mapping, that of the smallest matrix in one, and what matrices are rounded up to there."""
_KEPT_BYTES = 1 << 20
"""The size of results from which on their memory is kept: smaller ones are the allocator's."""
_MOST_KEPT, _MOST_TIMES = 16, 4
"""The number of buffers of a thread, and how many times as large as a result one may be."""


def large_pages(num_bytes: int) -> Tensor:
    """Return (num_bytes,) uint8 without content, on pages of 2 MiB where the system has them: a processor that reads memory in
    order stops at the end of each page, and looks up where the next one is. Such memory is given back when nothing uses what was
    asked for before and behind it."""
    arena = _current.arena
    if arena is None or not num_bytes:
        if num_bytes < _LEAST_BYTES:
            return torch.empty(num_bytes, dtype=torch.uint8)
        arena = _together
    return torch.frombuffer(arena.take(num_bytes), dtype=torch.uint8)


@contextmanager
def taken_from(arena: "Arena | None") -> Generator[None]:
    """Have this thread's `large_pages`, of any size, come from `arena` within the block; None: from where they come without."""
    before, _current.arena = _current.arena, arena
    try:
        yield
    finally:
        _current.arena = before


def result(*shape: int) -> Tensor:
    """Return float32 of that shape without content. Memory of large ones is taken again when the tensor before is gone: an
    allocator gives it back to the system, which clears it page by page for the next one."""
    num_bytes = 4 * prod(shape)
    if num_bytes < _KEPT_BYTES:
        return torch.empty(shape)
    return torch.frombuffer(_kept.take(num_bytes), dtype=torch.float32, count=num_bytes // 4).view(shape)


def give_back_freed() -> None:
    """Give the system the memory that lies free between what the C library has handed out. By itself the library gives back only
    what lies behind all of that, and rows that are joined for a layer's matrix seldom do when they are free."""
    if _trim is not None:
        _trim(0)


class PageMapping(mmap.mmap):
    """A mapping that is gone when nothing uses it."""

    holds: object = None
    """What must live as long as it does."""


class Arena:
    """Pieces of large mappings, one behind the other: one of its own would have small pages at both of its ends."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._rest = memoryview(b"")

    def take(self, num_bytes: int) -> memoryview:
        wanted = -(-num_bytes // _LINE_BYTES) * _LINE_BYTES
        with self._lock:
            if wanted > len(self._rest):
                pages = -(-wanted // _HUGE_BYTES) * _HUGE_BYTES
                self._rest = memoryview(self._mapping(max(pages, _TOGETHER_BYTES)))
            piece, self._rest = self._rest[:num_bytes], self._rest[wanted:]
        return piece

    def _mapping(self, num_bytes: int) -> "PageMapping":
        return mapped(num_bytes)


class _Current(threading.local):
    arena: Arena | None = None


class _Buffers(threading.local):
    """One thread's buffers. A tensor holds the view of the buffer that it lies in, so that the view is gone when it is."""

    def __init__(self) -> None:
        self._used: list[tuple[mmap.mmap, weakref.ref[memoryview]]] = []

    def take(self, num_bytes: int) -> memoryview:
        """Return a view of the smallest buffer that is large enough and free, or of a new one."""
        free = [buffer for buffer, view in self._used if view() is None]
        fitting = [each for each in free if num_bytes <= len(each) <= _MOST_TIMES * num_bytes]
        buffer = min(fitting, key=len) if fitting else mapped(-(-num_bytes // _HUGE_BYTES) * _HUGE_BYTES)
        view = memoryview(buffer)
        self._used = [each for each in self._used if each[0] is not buffer] + [(buffer, weakref.ref(view))]
        if len(self._used) > _MOST_KEPT:  # sizes have changed: the one that was used longest ago goes
            oldest = next((each for each in self._used if each[1]() is None), None)
            self._used = [each for each in self._used if each is not oldest]
        return view


def mapped(num_bytes: int) -> PageMapping:
    """Return private memory on large pages, where the system has them."""
    memory = PageMapping(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if _HUGE is not None:
        with suppress(OSError):  # a system that was built without them
            memory.madvise(_HUGE)
    return memory


_together, _kept, _current = Arena(), _Buffers(), _Current()
