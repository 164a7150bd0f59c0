"""Memory for an instance's KV pools that the processes of its ranks can map as well."""

import mmap
import os
import weakref


def take_memory(num_bytes: int) -> tuple[memoryview, str]:
    """Return zeroed memory, and the path by which other processes of this user on this host can map it. It is freed with its last
    user."""
    descriptor = os.memfd_create("baton-kv")
    os.ftruncate(descriptor, num_bytes)
    mapped = mmap.mmap(descriptor, num_bytes)
    weakref.finalize(mapped, os.close, descriptor)
    return memoryview(mapped), f"/proc/{os.getpid()}/fd/{descriptor}"
