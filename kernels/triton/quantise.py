"""Quantising, symmetric, with one scale for each vector: inside kernels, and as one.

Memory-bound. Floor: (M, K) is read once and written once in bytes."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.scaled_kv import LARGEST
from kernels.triton.platform import INTERPRETED, warps_for

_TILE = 4096
"""Elements of a program, at least: short vectors are taken several at a time."""

_ROUNDS_BADLY = tl.constexpr(INTERPRETED)
"""The interpreter loses the carry into float8's exponent when it rounds to nearest."""


@triton.jit
def scale_for(largest, LARGEST: tl.constexpr):
    """What to multiply stored values with, from the vectors' largest magnitudes; 1 for vectors of zeros."""
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
def quantise_rows(values, LARGEST: tl.constexpr, dtype: tl.constexpr):
    """(R, N) float32 -> (R, N) `dtype`, (R,) float32 scales."""
    scale = scale_for(tl.max(tl.abs(values), 1), LARGEST)
    return stored(values / scale[:, None], LARGEST, dtype), scale


@triton.jit(do_not_specialize=["num_vectors"])
def _quantise_kernel(
    x, out, scales, num_vectors, per_row, x_stride,
    N: tl.constexpr, BLOCK: tl.constexpr, VECTORS: tl.constexpr, LARGEST: tl.constexpr,
):  # fmt: skip
    """VECTORS vectors of N elements, of which a row of x has `per_row`."""
    vector = tl.program_id(0).to(tl.int64) * VECTORS + tl.arange(0, VECTORS)
    column = tl.arange(0, BLOCK)
    exists = vector < num_vectors
    mask = exists[:, None] & (column < N)[None, :]
    start = vector // per_row * x_stride + vector % per_row * N
    values = tl.load(x + start[:, None] + column[None, :], mask, 0.0).to(tl.float32)
    values, scale = quantise_rows(values, LARGEST, out.dtype.element_ty)
    tl.store(scales + vector, scale, exists)
    tl.store(out + vector[:, None] * N + column[None, :], values, mask)


def quantise(x: Tensor, dtype: torch.dtype, size: int) -> tuple[Tensor, Tensor]:
    """x (M, K) with contiguous rows, of which each `size` elements get a scale -> (M, K) in `dtype` (float8_e4m3fn or int8),
    and (M, K / size) float32 to multiply it with."""
    num_rows, inner = x.shape
    assert x.stride(1) == 1
    assert inner % size == 0
    per_row = inner // size
    out = torch.empty((num_rows, inner), dtype=dtype, device=x.device)
    scales = torch.empty((num_rows, per_row), dtype=torch.float32, device=x.device)
    if num_rows:
        block = triton.next_power_of_2(size)
        vectors = max(1, _TILE // block)
        _quantise_kernel[(triton.cdiv(num_rows * per_row, vectors),)](
            x, out, scales, num_rows * per_row, per_row, x.stride(0),
            N=size, BLOCK=block, VECTORS=vectors, LARGEST=LARGEST[dtype], num_warps=warps_for(vectors * block),
        )  # fmt: skip
    return out, scales
