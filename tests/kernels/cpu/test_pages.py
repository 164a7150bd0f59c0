"""Memory of matrices on large pages."""

import mmap
from pathlib import Path

import pytest
import torch

from kernels.cpu.pages import large_pages

MADVISED = Path("/sys/kernel/mm/transparent_hugepage/enabled")


@pytest.mark.parametrize("num_bytes", [0, 1, 4096, (2 << 20) - 1, 2 << 20, (5 << 20) + 3])
def test_memory_of_any_size_can_be_written(num_bytes: int) -> None:
    memory = large_pages(num_bytes)
    assert (memory.dtype, len(memory)) == (torch.uint8, num_bytes)
    assert int(memory.fill_(3).long().sum()) == 3 * num_bytes


@pytest.mark.skipif(
    not hasattr(mmap, "MADV_HUGEPAGE") or not MADVISED.exists() or "[never]" in MADVISED.read_text(),
    reason="this system has no large pages",
)
def test_the_system_is_asked_for_large_pages() -> None:
    memory = large_pages(8 << 20)
    lines = iter(Path("/proc/self/smaps").read_text().splitlines())
    for line in lines:
        start, _, end = line.split(" ")[0].partition("-")
        if end and int(start, 16) <= memory.data_ptr() < int(end, 16):
            break
    flags = next(line for line in lines if line.startswith("VmFlags"))
    assert "hg" in flags.split()
