"""Products whose bits for a row depend on that row alone: each sum is computed in one program, in the order of its terms. Slower
than cuBLAS, which adds up in as many ways as it has kernels.

For few rows memory-bound; floor: the weight is read once. For many 2 M N K flops; weights are read again for each tile of rows,
mostly from L2."""

from dataclasses import dataclass

import torch
import triton.language as tl
from torch import Tensor

from kernels.packed import LinearWeight, Prepacked, as_float
from kernels.rounding import Activations
from kernels.triton.launching import launchable
from kernels.triton.platform import INTERPRETED, capability, cdiv, dot_dtype, next_power_of_2, num_programs

_GROUP = tl.constexpr(16)
"""Rows of tiles whose programs run together."""


@dataclass(frozen=True, slots=True)
class GemmConfig:
    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int


def config_for(
    num_rows: int, size: int, batches: int, dtype: torch.dtype, device: torch.device
) -> GemmConfig:
    """Return the tiles. They may depend on the number of rows where instructions add a sum's terms up alike in all of them:
    Hopper's, as measured. Large ones are for products that give all processors some."""
    if INTERPRETED:
        return GemmConfig(16, min(32, max(16, next_power_of_2(size))), 32, 1, 1)
    block_n = min(64, max(16, next_power_of_2(size)))
    if dtype == torch.float32:
        return GemmConfig(64, block_n, 32, 4, 2)
    if capability(device) != 90:
        return GemmConfig(64, block_n, 64, 4, 4)
    if cdiv(num_rows, 256) * cdiv(size, 128) * batches >= num_programs(device):
        return GemmConfig(256, 128, 64, 8, 3)
    return GemmConfig(64, block_n, 128, 4, 4)


@launchable(do_not_specialize=["M"])
def _gemm_kernel(
    x, weight, bias, out, M, N, K, x_stride, x_batch, weight_stride, weight_inner, weight_batch,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, EVEN: tl.constexpr, BIAS: tl.constexpr,
    DOT: tl.constexpr,
):  # fmt: skip
    """Program (tile, batch). x: row r of batch b at r * x_stride + b * x_batch; out (M, batches, N). EVEN: K is a multiple of
    BLOCK_K. Programs that run at the same time have few rows of tiles and few columns, to find what they read in L2."""
    tile, batch = tl.program_id(0), tl.program_id(1).to(tl.int64)
    columns = tl.cdiv(N, BLOCK_N)
    first = tile // (_GROUP * columns) * _GROUP
    rows = min(tl.cdiv(M, BLOCK_M) - first, _GROUP)
    within = tile % (_GROUP * columns)
    row = (first + within % rows).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    column = within // rows * BLOCK_N + tl.arange(0, BLOCK_N)
    inner = tl.arange(0, BLOCK_K)
    exists, inside = row < M, column < N
    left = x + batch * x_batch + row[:, None] * x_stride + inner[None, :]
    right = weight + batch * weight_batch + column.to(tl.int64)[None, :] * weight_stride
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for k in tl.range(0, K, BLOCK_K):
        if EVEN:
            a = tl.load(left + k, exists[:, None], 0.0)
            b = tl.load(right + (k + inner)[:, None] * weight_inner, inside[None, :], 0.0)
        else:
            there = inner < K - k
            a = tl.load(left + k, exists[:, None] & there[None, :], 0.0)
            b = tl.load(right + (k + inner)[:, None] * weight_inner, inside[None, :] & there[:, None], 0.0)
        acc = tl.dot(a.to(DOT), b.to(DOT), acc, input_precision="ieee")
    if BIAS:
        acc += tl.load(bias + column, inside, 0.0).to(tl.float32)[None, :]
    target = out + (row[:, None] * tl.num_programs(1) + batch) * N + column[None, :]
    tl.store(target, acc.to(out.dtype.element_ty), exists[:, None] & inside[None, :])


def linear(x: Activations, weight: LinearWeight, bias: Tensor | None) -> Tensor:
    """`Ops.linear`."""
    assert not isinstance(weight, Prepacked), "nothing is packed here"
    assert isinstance(x, Tensor), "nothing is rounded here"
    return _multiply(x[:, None], as_float(weight, x.dtype)[None], bias)[:, 0]


def batched_linear(x: Tensor, weight: Tensor) -> Tensor:
    """`x` (T, H, K), weight (H, N, K) of any strides -> (T, H, N): each head's rows times its own matrix."""
    return _multiply(x, weight, None)


def _multiply(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    num_rows, batches, inner = x.shape
    size = weight.shape[1]
    x = x if x.stride(2) == 1 else x.contiguous()
    out = x.new_empty((num_rows, batches, size))
    if not num_rows:
        return out
    config = config_for(num_rows, size, batches, x.dtype, x.device)
    _gemm_kernel[(cdiv(size, config.block_n) * cdiv(num_rows, config.block_m), batches)](
        x, weight, bias, out, num_rows, size, inner, x.stride(0), x.stride(1),
        weight.stride(1), weight.stride(2), weight.stride(0),
        BLOCK_M=config.block_m, BLOCK_N=config.block_n, BLOCK_K=config.block_k, EVEN=inner % config.block_k == 0,
        BIAS=bias is not None, DOT=dot_dtype(x.dtype), num_warps=config.num_warps, num_stages=config.num_stages,
    )  # fmt: skip
    return out
