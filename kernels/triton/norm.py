"""RMSNorm (Zhang and Sennrich, 2019), with the residual's addition before it and rounding to 8 bits after it.

Memory-bound. Floor: every row of x (and of the residual, twice) is moved once, and once more as the result."""

import triton
import triton.language as tl
from torch import Tensor

from kernels.rounding import LARGEST, Rounded, Rounding
from kernels.triton.launching import await_inputs, launchable
from kernels.triton.platform import INTERPRETED, cdiv, next_power_of_2, num_programs, warps_for
from kernels.triton.quantise import empty_rounded, quantise_groups, scale_for, stored

_TILE = 2048
"""Elements of a program, at least: short rows (a head's) are taken several at a time."""
_LONG, _MOST_AHEAD = (64, 256) if INTERPRETED else (4096, 16384)
"""Rows of more elements are taken one after the other by programs that stay. The next ones are copied to shared memory meanwhile,
unless rows are so long that they do not fit. (On an H100 a norm of 8,192 in int8 takes 0.79 of the time.)"""


@triton.jit
def _sum_and_most(sum_a, most_a, sum_b, most_b):
    return sum_a + sum_b, tl.maximum(most_a, most_b)


@launchable(overlaps=True, do_not_specialize=["num_rows"])
def _rms_norm_kernel(
    x, residual, weight, out, scales, given, eps, num_rows, inner, outer_stride, inner_stride,
    N: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, ADD: tl.constexpr, GROUP: tl.constexpr, LARGEST: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """Programs take ROWS rows of N at a time. Row r of x lies at (r // inner) * outer_stride + (r % inner) * inner_stride."""
    has_one_scale: tl.constexpr = LARGEST > 0 and GROUP >= N
    column = tl.arange(0, BLOCK)
    gain = tl.load(weight + column, column < N, 0.0).to(tl.float32)[None, :]
    await_inputs()
    for tile in tl.range(tl.program_id(0), tl.cdiv(num_rows, ROWS), tl.num_programs(0), num_stages=STAGES):
        row = tile * ROWS + tl.arange(0, ROWS).to(tl.int64)
        packed = row[:, None] * N + column[None, :]
        place = (row // inner * outer_stride + row % inner * inner_stride)[:, None] + column[None, :]
        mask = (row < num_rows)[:, None] & (column < N)[None, :]
        values = tl.load(x + place, mask, 0.0).to(tl.float32)
        if ADD:
            values += tl.load(residual + packed, mask, 0.0).to(tl.float32)
            values = values.to(residual.dtype.element_ty)
            tl.store(residual + packed, values, mask)
            values = values.to(tl.float32)
        if has_one_scale and given is None:
            squares, most = tl.reduce((values * values, tl.abs(values * gain)), 1, _sum_and_most)
            inverse = tl.rsqrt(squares / N + eps)
            scale = scale_for(most * inverse, LARGEST)
            tl.store(scales + row, scale, row < num_rows)
        else:
            inverse = tl.rsqrt(tl.sum(values * values, 1) / N + eps)
            if has_one_scale:
                scale = tl.load(given) + tl.zeros((ROWS,), tl.float32)
        values = values * inverse[:, None] * gain
        if has_one_scale:
            values = stored(values / scale[:, None], LARGEST, out.dtype.element_ty)
        elif LARGEST > 0:
            values = quantise_groups(
                values, given, scales, row, num_rows, N, ROWS, BLOCK, GROUP, LARGEST, out.dtype.element_ty
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
    tiles, is_long = cdiv(num_rows, rows), size > _LONG
    programs = min(tiles, num_programs(x.device, 2)) if is_long else tiles
    _rms_norm_kernel[(programs,)](
        x, residual, weight, out, scales, how and how.scale, eps, num_rows, inner,
        x.stride(0) if x.dim() > 1 else size, x.stride(1) if x.dim() == 3 else 0,
        N=size, BLOCK=block, ROWS=rows, ADD=residual is not None,
        GROUP=how.group or block if how else 0, LARGEST=LARGEST[how.dtype] if how else 0.0,
        STAGES=3 if is_long and block <= _MOST_AHEAD else 1,
        num_warps=max(8, block // 2048) if is_long else warps_for(rows * block),
    )  # fmt: skip
