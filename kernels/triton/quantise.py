"""Quantises symmetrically, with one scale for each vector, or one that is given: inside kernels, and as one.

Memory-bound. Floor: (M, K) is read once and written once in bytes."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.rounding import LARGEST, Rounded, Rounding
from kernels.triton.launching import launchable
from kernels.triton.platform import INTERPRETED, cdiv, next_power_of_2, warps_for

_TILE = 4096
"""The fewest elements of a program. Short vectors are taken several at a time."""

_ROUNDS_BADLY = tl.constexpr(INTERPRETED)
"""Whether the interpreter is used, which loses the carry into float8's exponent when it rounds to nearest."""


@triton.jit
def scale_for(largest, LARGEST: tl.constexpr):
    """Return what to multiply stored values with, from the vectors' largest magnitudes; 1 for vectors of zeros."""
    return tl.where(largest > 0, largest / LARGEST, 1.0)


@triton.jit
def stored(values, LARGEST: tl.constexpr, dtype: tl.constexpr):
    """float32, divided by its scale -> `dtype`. Integers are rounded half up."""
    if dtype == tl.int8:
        values = tl.floor(values + 0.5)
    values = tl.minimum(tl.maximum(values, -LARGEST), LARGEST)
    if dtype == tl.int8:
        values = values.to(dtype)
    elif _ROUNDS_BADLY:
        values = _to_three_bits(values).to(dtype, fp_downcast_rounding="rtz")
    else:
        values = values.to(dtype, fp_downcast_rounding="rtne")
    return values


@triton.jit
def _to_three_bits(values):
    """float32 -> the nearest with float8's mantissa, of two the even one."""
    bits = values.to(tl.int32, bitcast=True)
    bits = bits + 0x7FFFF + ((bits >> 20) & 1)
    return (bits & -0x100000).to(tl.float32, bitcast=True)


@triton.jit
def quantise_rows(values, given, LARGEST: tl.constexpr, dtype: tl.constexpr):
    """(R, N) float32 -> (R, N) `dtype`, (R,) float32 scales, unless one is `given` for all."""
    if given is None:
        scale = scale_for(tl.max(tl.abs(values), 1), LARGEST)
        values = stored(values / scale[:, None], LARGEST, dtype)
    else:
        scale = tl.load(given)
        values = stored(values / scale, LARGEST, dtype)
    return values, scale


@triton.jit
def quantise_groups(
    values, given, scales, row, num_rows, N: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, GROUP: tl.constexpr,
    LARGEST: tl.constexpr, dtype: tl.constexpr,
):  # fmt: skip
    """(ROWS, BLOCK) float32, N of its columns -> the same in `dtype`; a scale for each GROUP neighbours, unless one is
    `given`, goes to `scales`, for each of the rows `row` (ROWS,) below `num_rows`."""
    groups: tl.constexpr = BLOCK // GROUP
    per_row: tl.constexpr = (N + GROUP - 1) // GROUP
    parts, scale = quantise_rows(tl.reshape(values, (ROWS * groups, GROUP)), given, LARGEST, dtype)
    if given is None:
        group = tl.arange(0, groups)[None, :]
        exists = (row < num_rows)[:, None] & (group < per_row)
        tl.store(scales + row[:, None] * per_row + group, tl.reshape(scale, (ROWS, groups)), exists)
    return tl.reshape(parts, (ROWS, BLOCK))


@launchable(do_not_specialize=["num_vectors"])
def _quantise_kernel(
    x, out, scales, given, num_vectors, per_row, x_stride,
    N: tl.constexpr, BLOCK: tl.constexpr, VECTORS: tl.constexpr, LARGEST: tl.constexpr,
):  # fmt: skip
    """VECTORS vectors of N elements, of which a row of x has `per_row`."""
    vector = tl.program_id(0).to(tl.int64) * VECTORS + tl.arange(0, VECTORS)
    column = tl.arange(0, BLOCK)
    exists = vector < num_vectors
    mask = exists[:, None] & (column < N)[None, :]
    start = vector // per_row * x_stride + vector % per_row * N
    values = tl.load(x + start[:, None] + column[None, :], mask, 0.0).to(tl.float32)
    values, scale = quantise_rows(values, given, LARGEST, out.dtype.element_ty)
    if given is None:
        tl.store(scales + vector, scale, exists)
    tl.store(out + vector[:, None] * N + column[None, :], values, mask)


def empty_rounded(
    num_rows: int, size: int, dtype: torch.dtype, how: Rounding, device: torch.device
) -> Rounded:
    """(num_rows, size) to be filled by a kernel; `dtype`: of what is rounded. Its scales are the given one, if there is."""
    assert not how.group or size % how.group == 0
    shape = (num_rows, size // how.group) if how.group else (num_rows,)
    scales = torch.empty(shape, dtype=torch.float32, device=device) if how.scale is None else how.scale
    return Rounded(torch.empty((num_rows, size), dtype=how.dtype, device=device), scales, dtype)


def round_to(x: Tensor, how: Rounding) -> Rounded:
    """`x` (M, K) with contiguous rows -> (M, K)."""
    num_rows, inner = x.shape
    assert x.stride(1) == 1
    size = how.group or inner
    per_row = inner // size
    out = empty_rounded(num_rows, inner, x.dtype, how, x.device)
    if num_rows:
        block = next_power_of_2(size)
        vectors = max(1, _TILE // block)
        _quantise_kernel[(cdiv(num_rows * per_row, vectors),)](
            x, out.values, out.scales, how.scale, num_rows * per_row, per_row, x.stride(0),
            N=size, BLOCK=block, VECTORS=vectors, LARGEST=LARGEST[how.dtype], num_warps=warps_for(vectors * block),
        )  # fmt: skip
    return out
