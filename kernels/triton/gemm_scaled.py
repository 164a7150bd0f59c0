"""Products of 8-bit activations and weights: float8 or int8, scaled for each row and channel (or for all), or by blocks.

Persistent programs take output tiles in an order that keeps both operands in L2. Floor for many rows: 2 M N K flops at
the 8-bit rate. For few, memory-bound: the weight is read once."""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from kernels.packed import SCALE_BLOCK
from kernels.triton.launching import launchable
from kernels.triton.platform import INTERPRETED, capability, cdiv, next_power_of_2, num_programs
from kernels.triton.split import add_parts, parts_of

_BAND = 8
"""Rows of tiles that are computed before the next columns."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaledGemmConfig:
    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int


def config_for(num_rows: int, device: torch.device) -> ScaledGemmConfig:
    if INTERPRETED:
        return ScaledGemmConfig(block_m=16, block_n=32, block_k=SCALE_BLOCK, num_warps=1, num_stages=1)
    if num_rows <= 64:
        return ScaledGemmConfig(
            block_m=max(16, next_power_of_2(num_rows)),
            block_n=64,
            block_k=SCALE_BLOCK,
            num_warps=4,
            num_stages=6,
        )
    if capability(device) < 90:
        return ScaledGemmConfig(block_m=128, block_n=64, block_k=64, num_warps=8, num_stages=3)
    return ScaledGemmConfig(block_m=128, block_n=128, block_k=SCALE_BLOCK, num_warps=8, num_stages=4)


@triton.jit
def tile_of(index, num_m, num_n, BAND: tl.constexpr):
    """Row and column of the `index`-th output tile: down a band of BAND rows, then to the next column."""
    per_band = BAND * num_n
    first = index // per_band * BAND
    height = min(num_m - first, BAND)
    within = index % per_band
    return first + within % height, within // height


@launchable(do_not_specialize=["M", "a_scale_stride", "b_scale_stride", "parts"])
def _gemm_kernel(
    a, b, a_scales, b_scales, bias, out, M, N, K, a_scale_stride, b_scale_stride, parts,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BAND: tl.constexpr,
    BLOCKWISE: tl.constexpr, BIAS: tl.constexpr, ACC: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    """`a` (M, K), b (N, K): descriptors. Scales: element i at i * stride, or BLOCKWISE row-major with strides of rows. out
    (parts, M, N): sums over a part of K each, of which there are several if SPLIT."""
    num_m, num_n, num_k = tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N), tl.cdiv(K, BLOCK_K)
    for index in tl.range(tl.program_id(0), num_m * num_n * parts, tl.num_programs(0)):
        part = index % parts if SPLIT else 0
        tile_m, tile_n = tile_of(index // parts if SPLIT else index, num_m, num_n, BAND)
        row, column = tile_m * BLOCK_M + tl.arange(0, BLOCK_M), tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
        acc = tl.zeros((BLOCK_M, BLOCK_N), ACC)
        first, last = (num_k * part // parts, num_k * (part + 1) // parts) if SPLIT else (0, num_k)
        for k in tl.range(first, last):
            left = a.load([tile_m * BLOCK_M, k * BLOCK_K])
            right = b.load([tile_n * BLOCK_N, k * BLOCK_K])
            if BLOCKWISE:
                # A tile is no wider than a block, so its columns have one scale: a number for each row, not for each product.
                a_scale = tl.load(a_scales + row * a_scale_stride + k, row < M, 0.0)
                b_scale = tl.load(b_scales + tile_n * BLOCK_N // BLOCK_K * b_scale_stride + k)
                acc += tl.dot(left, right.T) * (a_scale * b_scale)[:, None]
            else:
                acc = tl.dot(left, right.T, acc, out_dtype=ACC)
        result = acc.to(tl.float32)
        if not BLOCKWISE:
            result *= tl.load(a_scales + row * a_scale_stride, row < M, 0.0)[:, None]
            result *= tl.load(b_scales + column * b_scale_stride, column < N, 0.0)[None, :]
        if BIAS:
            result += tl.load(bias + column, column < N, 0.0).to(tl.float32)[None, :]
        target = out + (part * M + row).to(tl.int64)[:, None] * N + column[None, :]
        tl.store(target, result.to(out.dtype.element_ty), (row < M)[:, None] & (column < N)[None, :])


def linear_scaled(
    x: Tensor, weight: Tensor, x_scales: Tensor, weight_scales: Tensor, dtype: torch.dtype, bias: Tensor | None = None
) -> Tensor:  # fmt: skip
    """`x` (M, K), weight (N, K), both float8_e4m3fn or both int8, K a multiple of 16 -> (M, N) of `dtype`.

    Scales, float32, multiply: x_scales (M,) or (1,) with weight_scales (N,) or (1,); or, from compute capability 9.0 on, for
    float8 and K a multiple of 128, x_scales (M, K / 128) with weight_scales (ceil(N / 128), K / 128)."""
    (num_rows, inner), size = x.shape, weight.shape[0]
    blockwise = weight_scales.dim() == 2
    assert inner % (SCALE_BLOCK if blockwise else 16) == 0
    out = torch.empty((num_rows, size), dtype=dtype, device=x.device)
    if not num_rows:
        return out
    config = config_for(num_rows, x.device)
    assert not blockwise or (config.block_k == SCALE_BLOCK and SCALE_BLOCK % config.block_n == 0)
    tiles = cdiv(num_rows, config.block_m) * cdiv(size, config.block_n)
    parts = parts_of(tiles, cdiv(inner, config.block_k), x.device)
    sums = out if parts == 1 else torch.empty((parts, num_rows, size), dtype=torch.float32, device=x.device)
    few = num_programs(x.device, 2 if config.block_m <= 64 else 1)
    _gemm_kernel[(min(tiles * parts, few),)](
        TensorDescriptor.from_tensor(x, [config.block_m, config.block_k]),
        TensorDescriptor.from_tensor(weight, [config.block_n, config.block_k]),
        x_scales, weight_scales, None if parts > 1 else bias, sums, num_rows, size, inner,
        _stride(x_scales), _stride(weight_scales), parts,
        BLOCK_M=config.block_m, BLOCK_N=config.block_n, BLOCK_K=config.block_k, BAND=_BAND, BLOCKWISE=blockwise,
        BIAS=parts == 1 and bias is not None, ACC=tl.int32 if x.dtype == torch.int8 else tl.float32, SPLIT=parts > 1,
        num_warps=config.num_warps, num_stages=config.num_stages,
    )  # fmt: skip
    if parts > 1:
        add_parts(sums, bias, out)
    return out


def _stride(scales: Tensor) -> int:
    return 0 if scales.numel() == 1 else scales.stride(0)
