"""RMSNorm (Zhang and Sennrich, 2019), with the residual's addition before it and rounding to 8 bits after it.

Memory-bound. Floor: every row of x (and of the residual, twice) is moved once, and once more as the result."""

import triton.language as tl
from torch import Tensor

from kernels.rounding import LARGEST, Rounded, Rounding
from kernels.triton.launching import launchable
from kernels.triton.platform import cdiv, next_power_of_2, warps_for
from kernels.triton.quantise import empty_rounded, quantise_groups

_TILE = 2048
"""Elements of a program, at least: short rows (a head's) are taken several at a time."""


@launchable(do_not_specialize=["num_rows"])
def _rms_norm_kernel(
    x, residual, weight, out, scales, given, eps, num_rows, inner, outer_stride, inner_stride,
    N: tl.constexpr, BLOCK_N: tl.constexpr, ROWS: tl.constexpr, ADD: tl.constexpr, GROUP: tl.constexpr,
    LARGEST: tl.constexpr,
):  # fmt: skip
    """ROWS rows of N. Row r of x lies at (r // inner) * outer_stride + (r % inner) * inner_stride."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK_N)
    mask = (row < num_rows)[:, None] & (column < N)[None, :]
    start = row // inner * outer_stride + row % inner * inner_stride
    values = tl.load(x + start[:, None] + column[None, :], mask, 0.0).to(tl.float32)
    packed = row[:, None] * N + column[None, :]
    if ADD:
        values += tl.load(residual + packed, mask, 0.0).to(tl.float32)
        values = values.to(residual.dtype.element_ty)
        tl.store(residual + packed, values, mask)
        values = values.to(tl.float32)
    inverse = tl.rsqrt(tl.sum(values * values, 1) / N + eps)
    gain = tl.load(weight + column, column < N, 0.0).to(tl.float32)
    values = values * inverse[:, None] * gain[None, :]
    if LARGEST > 0:
        values = quantise_groups(
            values, given, scales, row, num_rows, N, ROWS, BLOCK_N, GROUP, LARGEST, out.dtype.element_ty
        )
    tl.store(out + packed, values.to(out.dtype.element_ty), mask)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """(..., N) with contiguous rows, up to three dimensions -> the same, contiguous."""
    out = x.new_empty(x.shape)
    _launch(x, None, weight, eps, out)
    return out


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`residual` (..., N), contiguous, becomes x + residual; -> its norm."""
    out = x.new_empty(x.shape)
    _launch(x, residual, weight, eps, out)
    return out


def norm_rounded(
    x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, how: Rounding
) -> tuple[Tensor, Rounded]:
    """`Ops.norm_rounded`; x and `residual`, which becomes the sum, are (T, N)."""
    out = empty_rounded(len(x), x.shape[1], x.dtype, how, x.device)
    _launch(x, residual, weight, eps, out.values, out.scales, how)
    return x if residual is None else residual, out


def _launch(
    x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, out: Tensor,
    scales: Tensor | None = None, how: Rounding | None = None,
) -> None:  # fmt: skip
    assert x.stride(-1) == 1
    assert x.dim() <= 3
    size = x.shape[-1]
    num_rows = x.numel() // size
    inner = x.shape[1] if x.dim() == 3 else 1
    block = next_power_of_2(size)
    rows = max(1, _TILE // block)
    _rms_norm_kernel[(cdiv(num_rows, rows),)](
        x, residual, weight, out, scales, how and how.scale, eps, num_rows, inner,
        x.stride(0) if x.dim() > 1 else size, x.stride(1) if x.dim() == 3 else 0,
        N=size, BLOCK_N=block, ROWS=rows, ADD=residual is not None,
        GROUP=how.group or block if how else 0, LARGEST=LARGEST[how.dtype] if how else 0.0,
        num_warps=warps_for(rows * block),
    )  # fmt: skip
