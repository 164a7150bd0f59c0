"""Products whose sums are split among programs, where there are too few tiles of the output to occupy a GPU: parts are added up
in their order, so that bits depend on shapes alone."""

import torch
import triton.language as tl
from torch import Tensor

from kernels.triton.launching import launchable
from kernels.triton.platform import INTERPRETED, cdiv, num_programs

_PROGRAMS = 2
"""For each multiprocessor."""
_FEWEST = 4
"""Blocks of a part: with fewer, most of its time is the latency of its first."""


def parts_of(num_tiles: int, num_blocks: int, device: torch.device) -> int:
    """Return into how many parts a sum over `num_blocks` blocks is split, where the output has `num_tiles` tiles."""
    if INTERPRETED:
        return min(2, num_blocks)
    return max(1, min(num_programs(device, _PROGRAMS) // num_tiles, num_blocks // _FEWEST))


@launchable(do_not_specialize=["size", "num_parts"])
def _add_kernel(parts, bias, out, size, N, num_parts, BIAS: tl.constexpr, BLOCK: tl.constexpr):
    each = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    exists = each < size
    acc = tl.zeros((BLOCK,), tl.float32)
    for part in tl.range(num_parts):
        acc += tl.load(parts + part * size + each, exists, 0.0)
    if BIAS:
        acc += tl.load(bias + each % N, exists, 0.0).to(tl.float32)
    tl.store(out + each, acc.to(out.dtype.element_ty), exists)


def add_parts(parts: Tensor, bias: Tensor | None, out: Tensor) -> None:
    """`out` (M, N) = the sum of parts (P, M, N) float32, all contiguous, and of bias (N,)."""
    size, block = out.numel(), 1024
    _add_kernel[(cdiv(size, block),)](
        parts, bias, out, size, out.shape[1], len(parts), BIAS=bias is not None, BLOCK=block, num_warps=4
    )
