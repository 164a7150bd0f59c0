"""Memory for what is read whole in each step."""

import mmap
from contextlib import suppress

import torch
from torch import Tensor

_HUGE = getattr(mmap, "MADV_HUGEPAGE", None)
_HUGE_BYTES = 2 << 20


def large_pages(num_bytes: int) -> Tensor:
    """Return (num_bytes,) uint8 without content, on pages of 2 MiB where the system has them: a processor that reads memory in
    order stops at the end of each page, and looks up where the next one is."""
    if _HUGE is None or num_bytes < _HUGE_BYTES:
        return torch.empty(num_bytes, dtype=torch.uint8)
    memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):  # a system that was built without them
        memory.madvise(_HUGE)
    return torch.frombuffer(memory, dtype=torch.uint8)
