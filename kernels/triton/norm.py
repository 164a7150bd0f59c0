"""RMSNorm (Zhang and Sennrich, 2019), with the residual's addition before it and rounding to 8 bits after it.

Memory-bound. Floor: every row of x (and of the residual, twice) is moved once, and once more as the result."""

import triton.language as tl
from torch import Tensor

from kernels.rounding import LARGEST, Rounded, Rounding
from kernels.triton.launching import launchable
from kernels.triton.platform import INTERPRETED, cdiv, next_power_of_2, warps_for
from kernels.triton.quantise import empty_rounded, quantise_groups, scale_for, stored

_TILE = 2048
"""Elements of a program, at least: short rows (a head's) are taken several at a time."""
_MOST = 64 if INTERPRETED else 4096
"""Elements of a row that is kept in registers."""
_CHUNK, _CHUNK_WARPS = 128 if INTERPRETED else 2048, 8
"""Elements of a longer row that are in registers at once. (On an H200 a norm of 8,192 in float8 takes 0.77 of the time.)"""


@launchable(do_not_specialize=["num_rows"])
def _rms_norm_kernel(
    x, residual, weight, out, scales, given, eps, num_rows, inner, outer_stride, inner_stride,
    N: tl.constexpr, CHUNK: tl.constexpr, ROWS: tl.constexpr, ADD: tl.constexpr, GROUP: tl.constexpr,
    LARGEST: tl.constexpr,
):  # fmt: skip
    """ROWS rows of N. Row r of x lies at (r // inner) * outer_stride + (r % inner) * inner_stride. Rows of more than CHUNK are
    read twice, the second time from a cache, so that many programs are under way on a processor."""
    is_long: tl.constexpr = N > CHUNK
    has_one_scale: tl.constexpr = is_long and LARGEST > 0 and GROUP >= N
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, CHUNK)
    packed = row[:, None] * N + column[None, :]
    place = (row // inner * outer_stride + row % inner * inner_stride)[:, None] + column[None, :]
    exists = (row < num_rows)[:, None]
    squares, most = tl.zeros((ROWS, CHUNK), tl.float32), tl.zeros((ROWS, CHUNK), tl.float32)
    values = tl.zeros((ROWS, CHUNK), tl.float32)
    for at in tl.static_range(0, N, CHUNK):
        mask = exists & (column < N - at)[None, :]
        values = tl.load(x + place + at, mask, 0.0).to(tl.float32)
        if ADD:
            values += tl.load(residual + packed + at, mask, 0.0).to(tl.float32)
            values = values.to(residual.dtype.element_ty)
            tl.store(residual + packed + at, values, mask)
            values = values.to(tl.float32)
        if is_long:
            squares += values * values
        else:
            squares = values * values
        if has_one_scale and given is None:
            gain = tl.load(weight + at + column, column < N - at, 0.0).to(tl.float32)
            most = tl.maximum(most, tl.abs(values * gain[None, :]))
    inverse = tl.rsqrt(tl.sum(squares, 1) / N + eps)
    scale = inverse
    if has_one_scale:
        if given is None:
            scale = scale_for(tl.max(most, 1) * inverse, LARGEST)
            tl.store(scales + row, scale, row < num_rows)
        else:
            scale = tl.load(given) + tl.zeros((ROWS,), tl.float32)
    if is_long and ADD:
        tl.debug_barrier()
    for at in tl.static_range(0, N, CHUNK):
        mask = exists & (column < N - at)[None, :]
        if is_long:
            if ADD:
                values = tl.load(residual + packed + at, mask, 0.0).to(tl.float32)
            else:
                values = tl.load(x + place + at, mask, 0.0).to(tl.float32)
        gain = tl.load(weight + at + column, column < N - at, 0.0).to(tl.float32)
        values = values * inverse[:, None] * gain[None, :]
        if has_one_scale:
            values = stored(values / scale[:, None], LARGEST, out.dtype.element_ty)
        elif LARGEST > 0:
            values = quantise_groups(
                values, given, scales, row, num_rows, N, ROWS, CHUNK, GROUP, LARGEST, out.dtype.element_ty, at
            )
        tl.store(out + packed + at, values.to(out.dtype.element_ty), mask)


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
    is_long = size > _MOST
    chunk = _CHUNK if is_long else next_power_of_2(size)
    rows = max(1, _TILE // chunk)
    _rms_norm_kernel[(cdiv(num_rows, rows),)](
        x, residual, weight, out, scales, how and how.scale, eps, num_rows, inner,
        x.stride(0) if x.dim() > 1 else size, x.stride(1) if x.dim() == 3 else 0,
        N=size, CHUNK=chunk, ROWS=rows, ADD=residual is not None,
        GROUP=how.group or next_power_of_2(size) if how else 0, LARGEST=LARGEST[how.dtype] if how else 0.0,
        num_warps=_CHUNK_WARPS if is_long else warps_for(rows * chunk),
    )  # fmt: skip
