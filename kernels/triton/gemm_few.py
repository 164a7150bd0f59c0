"""Products of few rows with weights of 16 bits, and the same with a gate behind it.

Memory-bound; floor: the weight is read once. A program computes some outputs of all rows, each sum whole: what is split among
programs is added up by another kernel, which takes as long as is won. Before it waits for its rows it asks for its first weights.
Several rows are multiplied by tensor cores, whose rows the weights are; for one row these would have nothing to do."""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.ops import Gate
from kernels.triton.activation import gated
from kernels.triton.launching import COMPILED, await_inputs, launchable
from kernels.triton.platform import INTERPRETED, capability, cdiv, dot_dtype, next_power_of_2

MOST_ROWS = 16
_DTYPES = (torch.bfloat16, torch.float16, *((torch.float32,) if INTERPRETED else ()))
_FEWEST_COLUMNS = 8
"""The fewest that a tensor core's product takes; rows of the input are its columns."""
_ALIGNED = 16
"""What rows of weights are a multiple of, so that 16 bytes are read at once."""


@dataclass(frozen=True, slots=True)
class FewConfig:
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int
    pieces: int
    """Pieces of a row that are asked for ahead, as many as each thread asks for one of."""
    piece_bytes: int


_ROWS = FewConfig(16, 32, 1, 1, 1, 16) if INTERPRETED else FewConfig(16, 256, 1, 4, 2, 512)
_GATED_ROWS = _ROWS if INTERPRETED else FewConfig(32, 256, 2, 4, 2, 512)
_ROW = FewConfig(16, 32, 1, 1, 1, 16) if INTERPRETED else FewConfig(8, 512, 4, 3, 16, 128)
"""Sizes are those that were fastest on an H100."""


@triton.jit
def _prefetch(rows, K: tl.constexpr, PIECES: tl.constexpr, PIECE: tl.constexpr):
    """Ask for PIECES of PIECE bytes of each of the `rows`, pointers to K numbers, to be brought to L2."""
    each: tl.constexpr = PIECE * 8 // rows.dtype.element_ty.primitive_bitwidth
    if COMPILED:
        if PIECES * each <= K:
            at = rows[:, None] + (tl.arange(0, PIECES) * each)[None, :]
            size = tl.full(at.shape, PIECE, tl.int32)
            tl.inline_asm_elementwise(
                "cp.async.bulk.prefetch.L2.global [$1], $2; mov.u32 $0, 0;", "=r,l,r", [at, size],
                dtype=tl.int32, is_pure=False, pack=1,
            )  # fmt: skip


@triton.jit
def _inside(column, N: tl.constexpr, BLOCK_N: tl.constexpr):
    """Return it with 0 in the place of what is no column."""
    if N % BLOCK_N:
        column = tl.where(column < N, column, 0)
    return column


@triton.jit
def _weight_rows(
    weight, column, N: tl.constexpr, K: tl.constexpr, BLOCK_N: tl.constexpr, PIECES: tl.constexpr, PIECE: tl.constexpr,
    GATED: tl.constexpr,
):  # fmt: skip
    """Return pointers to the columns' rows of weights, and to those of ups behind N gates, and ask for what they begin with."""
    gates = weight + _inside(column, N, BLOCK_N).to(tl.int64) * K
    ups = gates + N * K
    _prefetch(gates, K, PIECES, PIECE)
    if GATED:
        _prefetch(ups, K, PIECES, PIECE)
    return gates, ups


@triton.jit
def _stored(
    out, acc, up, bias, column, M, N: tl.constexpr,
    BIAS: tl.constexpr, GATED: tl.constexpr, GELU: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """Store acc (outputs, BLOCK_M), or what a gate makes of acc and `up`, both rounded first as they are without it."""
    row, inside = tl.arange(0, BLOCK_M), column < N
    kind = out.dtype.element_ty
    if BIAS:
        acc += tl.load(bias + column, inside, 0.0).to(tl.float32)[:, None]
    if GATED:
        if BIAS:
            up += tl.load(bias + N + column, inside, 0.0).to(tl.float32)[:, None]
        acc = gated(acc.to(kind).to(tl.float32), up.to(kind).to(tl.float32), GELU)
    target = out + row[None, :].to(tl.int64) * N + column[:, None]
    tl.store(target, acc.to(kind), (row < M)[None, :] & inside[:, None])


@launchable(overlaps=True, do_not_specialize=["M"])
def _rows_kernel(
    x, weight, bias, out, M, x_stride, N: tl.constexpr, K: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr, PIECES: tl.constexpr,
    PIECE: tl.constexpr, BIAS: tl.constexpr, GATED: tl.constexpr, GELU: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """BLOCK_N of N outputs of all M rows. GATED: weight is (2 N, K), gates and then ups."""
    column = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    row, inner = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_K)
    gates, ups = _weight_rows(weight, column, N, K, BLOCK_N, PIECES, PIECE, GATED)
    await_inputs()
    left, right = gates[:, None] + inner[None, :], ups[:, None] + inner[None, :]
    acc, up = tl.zeros((BLOCK_N, BLOCK_M), tl.float32), tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    source = x + row[None, :] * x_stride + inner[:, None]
    for k in tl.range(0, K, BLOCK_K, num_stages=STAGES):
        there = inner < (BLOCK_K if K % BLOCK_K == 0 else K - k)
        values = tl.load(source + k, there[:, None] & (row < M)[None, :], 0.0).to(DOT)
        first = tl.load(left + k, there[None, :], 0.0, eviction_policy="evict_first").to(DOT)
        acc = tl.dot(first, values, acc, input_precision="ieee")
        if GATED:
            second = tl.load(right + k, there[None, :], 0.0, eviction_policy="evict_first").to(DOT)
            up = tl.dot(second, values, up, input_precision="ieee")
    _stored(out, acc, up, bias, column, M, N, BIAS, GATED, GELU, BLOCK_M)


@launchable(overlaps=True)
def _row_kernel(
    x, weight, bias, out, N: tl.constexpr, K: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr, PIECES: tl.constexpr, PIECE: tl.constexpr,
    BIAS: tl.constexpr, GATED: tl.constexpr, GELU: tl.constexpr,
):  # fmt: skip
    """The same of one row."""
    column = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    inner = tl.arange(0, BLOCK_K)
    gates, ups = _weight_rows(weight, column, N, K, BLOCK_N, PIECES, PIECE, GATED)
    await_inputs()
    left, right = gates[:, None] + inner[None, :], ups[:, None] + inner[None, :]
    acc, up = tl.zeros((BLOCK_N, BLOCK_K), tl.float32), tl.zeros((BLOCK_N, BLOCK_K), tl.float32)
    for k in tl.range(0, K, BLOCK_K, num_stages=STAGES):
        there = inner < (BLOCK_K if K % BLOCK_K == 0 else K - k)
        values = tl.load(x + k + inner, there, 0.0).to(tl.float32)[None, :]
        first = tl.load(left + k, there[None, :], 0.0, eviction_policy="evict_first")
        acc += first.to(tl.float32) * values
        if GATED:
            second = tl.load(right + k, there[None, :], 0.0, eviction_policy="evict_first")
            up += second.to(tl.float32) * values
    _stored(out, tl.sum(acc, 1)[:, None], tl.sum(up, 1)[:, None], bias, column, 1, N, BIAS, GATED, GELU, 1)


def takes(x: Tensor, weight: Tensor) -> bool:
    """Return whether `linear_few` multiplies them, and faster than cuBLAS does: on Hopper, where that was measured."""
    num_rows, inner = x.shape
    return (
        0 < num_rows <= MOST_ROWS
        and inner % _ALIGNED == 0
        and x.dtype == weight.dtype
        and x.dtype in _DTYPES
        and weight.is_contiguous()
        and capability(x.device) == 90
    )


def linear_few(x: Tensor, weight: Tensor, bias: Tensor | None, gate: Gate | None = None) -> Tensor:
    """`x` (M, K), weight (N, K), bias (N,) -> (M, N); or, with a gate, weight (2 N, K) and bias (2 N,). See `takes`."""
    x = x if x.stride(1) == 1 else x.contiguous()
    num_rows, inner = x.shape
    size, gelu = len(weight) // (2 if gate else 1), gate == "gelu_tanh"
    out = x.new_empty((num_rows, size))
    if num_rows == 1:
        config = _ROW
        _row_kernel[(cdiv(size, config.block_n),)](
            x, weight, bias, out,
            N=size, K=inner, BLOCK_N=config.block_n, BLOCK_K=config.block_k, STAGES=config.num_stages, PIECES=config.pieces,
            PIECE=config.piece_bytes, BIAS=bias is not None, GATED=gate is not None, GELU=gelu,
            num_warps=config.num_warps,
        )  # fmt: skip
        return out
    config = _GATED_ROWS if gate else _ROWS
    _rows_kernel[(cdiv(size, config.block_n),)](
        x, weight, bias, out, num_rows, x.stride(0),
        N=size, K=inner, BLOCK_M=max(_FEWEST_COLUMNS, next_power_of_2(num_rows)), BLOCK_N=config.block_n, BLOCK_K=config.block_k,
        STAGES=config.num_stages, PIECES=config.pieces, PIECE=config.piece_bytes,
        BIAS=bias is not None, GATED=gate is not None, GELU=gelu, DOT=dot_dtype(x.dtype), num_warps=config.num_warps,
    )  # fmt: skip
    return out
