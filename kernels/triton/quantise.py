"""Quantising inside a kernel: symmetric, one scale for each vector."""

import triton
import triton.language as tl

from kernels.triton.platform import INTERPRETED

_FLOAT8_ROUNDING = tl.constexpr("rtz" if INTERPRETED else "rtne")
"""The interpreter loses the carry into the exponent when it rounds to nearest."""


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
    else:
        values = values.to(dtype, fp_downcast_rounding=_FLOAT8_ROUNDING)
    return values


@triton.jit
def quantise_rows(values, LARGEST: tl.constexpr, dtype: tl.constexpr):
    """(R, N) float32 -> (R, N) `dtype`, (R,) float32 scales."""
    scale = scale_for(tl.max(tl.abs(values), 1), LARGEST)
    return stored(values / scale[:, None], LARGEST, dtype), scale
