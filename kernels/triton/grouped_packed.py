"""Products of rows with the packed matrix of each row's group (grouped.py), made numbers of x's dtype in registers.

Rows are not rounded: experts have few each, so that their weights' bytes are the floor in decode; with many rows the products
run at x's rate, not at that of 8 bits."""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.packed import BLOCK, SCALE_BLOCK, EightBit, FourBit
from kernels.triton.gemm_four_bit import MOST_ROWS, dtype_of_products, four_bit_product, scale_words, warps_of
from kernels.triton.grouped import Groups, group_of, rows_of_tile
from kernels.triton.launching import launchable
from kernels.triton.platform import INTERPRETED, cdiv, dot_dtype, next_power_of_2
from kernels.triton.unpack import from_float8


@triton.jit
def _eight_bit_product(
    left, exists, values, scales, first, N, K,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BLOCKWISE: tl.constexpr, WHOLE: tl.constexpr,
    DOT: tl.constexpr,
):  # fmt: skip
    """(BLOCK_N, BLOCK_M) float32: columns of a weight from `first` on times rows that begin at `left` (BLOCK_M,), where they
    exist.

    values (N, K); scales (N,), or BLOCKWISE for each BLOCK_K rows and columns, of which tiles lie in one. WHOLE: K is a multiple
    of BLOCK_K."""
    inner, column = tl.arange(0, BLOCK_K), first + tl.arange(0, BLOCK_N)
    exists, inside = exists[:, None], (column < N)[:, None]
    right = values + column.to(tl.int64)[:, None] * K + inner[None, :]
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for k in tl.range(0, K, BLOCK_K):
        there = (inner < BLOCK_K if WHOLE else inner < K - k)[None, :]
        x = tl.load(left[:, None] + (k + inner)[None, :], exists & there, 0.0).to(DOT)
        w = tl.load(right + k, inside & there, 0.0)
        w = from_float8(w, DOT) if w.dtype == tl.float8e4nv else w.to(DOT)
        if BLOCKWISE:
            scale = tl.load(scales + first // BLOCK_K * (K // BLOCK_K) + k // BLOCK_K)
            acc += tl.dot(x, w.T, input_precision="ieee") * scale
        else:
            acc = tl.dot(x, w.T, acc, input_precision="ieee")
    if not BLOCKWISE:
        acc *= tl.load(scales + column, column < N, 0.0)[None, :]
    return acc.T


@launchable()
def _grouped_packed_kernel(
    x, weight, scales, factors, bias, out, order, starts, num_groups, N, K, width, x_stride, weight_stride, scale_stride,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_G: tl.constexpr,
    GROUP: tl.constexpr, SCALE: tl.constexpr, WHOLE: tl.constexpr, BLOCKWISE: tl.constexpr,
    GATHER: tl.constexpr, SCATTER: tl.constexpr, BIAS: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """Program (columns, tile); see grouped._grouped_kernel. GROUP: 0 for weights of 8 bits, else inputs that share a scale."""
    tile = tl.program_id(1)
    group, before = group_of(tile, starts, num_groups, BLOCK_M, BLOCK_G)
    if group < num_groups:
        place, pair, exists = rows_of_tile(tile - before, group, starts, order, BLOCK_M)
        source = pair // width if GATHER else place
        column = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
        left = x + source * x_stride
        held, own = group.to(tl.int64) * weight_stride, group.to(tl.int64) * scale_stride
        if GROUP == 0:
            acc = _eight_bit_product(
                left, exists, weight + held, scales + own, tl.program_id(0) * BLOCK_N, N, K, BLOCK_M, BLOCK_N, BLOCK_K,
                BLOCKWISE, WHOLE, DOT,
            )  # fmt: skip
        else:
            acc = four_bit_product(
                left, exists, weight + held, scales + own, column, 0, tl.cdiv(K, 128), N, K, BLOCK_M, BLOCK_N, GROUP, SCALE,
                WHOLE, DOT,
            )  # fmt: skip
        inside = column < N
        if factors is not None:
            acc *= tl.load(factors + group * N + column, inside, 0.0)[:, None]
        if BIAS:
            acc += tl.load(bias + group * N + column, inside, 0.0).to(tl.float32)[:, None]
        row = pair if SCATTER else place
        target = out + row[None, :] * N + column[:, None]
        tl.store(target, acc.to(out.dtype.element_ty), exists[None, :] & inside[:, None])


@dataclass(frozen=True, slots=True, kw_only=True)
class _Stored:
    """A weight as the kernel takes it."""

    values: Tensor
    scales: Tensor
    dot: tl.dtype
    group: int = 0
    scale: tl.dtype = tl.float32
    factors: Tensor | None = None
    blockwise: bool = False


def grouped_linear_packed(
    x: Tensor, weight: EightBit | FourBit, bias: Tensor | None, groups: Groups, out: Tensor, *,
    width: int = 0, scatter: bool = False,
) -> None:  # fmt: skip
    """As grouped.grouped_linear, with G matrices that are packed."""
    count, size, inner = weight.shape
    stored = _stored(weight, x.dtype)
    assert groups.block_m <= MOST_ROWS
    assert stored.values.is_contiguous()
    assert weight.scales.is_contiguous()
    assert out.is_contiguous()
    if not groups.max_tiles:
        return
    four = stored.group > 0
    block_n = 32 if INTERPRETED else 128 if four else 64
    num_warps = warps_of(groups.block_m) if four else 2 if groups.block_m <= 16 else 4
    _grouped_packed_kernel[(cdiv(size, block_n), groups.max_tiles)](
        x, stored.values, stored.scales, stored.factors, bias, out, groups.order, groups.starts, count, size,
        inner, width or 1, x.stride(0), stored.values.stride(0), stored.scales.stride(0),
        BLOCK_M=groups.block_m, BLOCK_N=block_n, BLOCK_K=SCALE_BLOCK, BLOCK_G=next_power_of_2(count),
        GROUP=stored.group, SCALE=stored.scale, WHOLE=inner % BLOCK == 0,
        BLOCKWISE=stored.blockwise,
        GATHER=width > 0, SCATTER=scatter, BIAS=bias is not None, DOT=stored.dot, num_warps=num_warps,
        num_stages=1 if INTERPRETED else 4,
    )  # fmt: skip


def _stored(weight: EightBit | FourBit, dtype: torch.dtype) -> _Stored:
    match weight:
        case EightBit():
            return _Stored(
                values=weight.values, scales=weight.scales, dot=dot_dtype(dtype), blockwise=weight.by_blocks
            )
        case FourBit():
            scales, scale = scale_words(weight)
            dot = dtype_of_products(weight, dtype)
            return _Stored(
                values=weight.words,
                scales=scales,
                dot=dot,
                group=weight.group,
                scale=scale,
                factors=weight.factors,
            )
