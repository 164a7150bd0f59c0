"""Products with 4-bit weights, for few rows: integers with a scale and a zero point for each group (AWQ, GPTQ), or MXFP4.

`kernels.packing` brings checkpoints into the layout read here. Memory-bound; floor: weight and scales are read once.
A weight becomes a number by putting its bits into a mantissa, which needs no conversion; the offset that this adds is taken
back with the zero point, from the sum of the activations."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.packed import FourBit
from kernels.triton.launching import launchable
from kernels.triton.platform import INTERPRETED, capability, dot_dtype


@triton.jit
def _as_number(nibbles, FLOAT4: tl.constexpr, OFFSET: tl.constexpr, DOT: tl.constexpr):
    """(K, N) of 0..15 -> DOT: the integer plus OFFSET, or the E2M1 number."""
    if FLOAT4:
        magnitude = nibbles & 7
        normal = ((magnitude << 22) + (126 << 23)).to(tl.float32, bitcast=True)
        number = tl.where(magnitude < 2, magnitude.to(tl.float32) * 0.5, normal)
        number = tl.where(nibbles > 7, -number, number).to(DOT)
    elif OFFSET == 128:
        number = (nibbles | 0x4300).to(tl.int16).to(tl.bfloat16, bitcast=True)
    elif OFFSET == 1024:
        number = (nibbles | 0x6400).to(tl.int16).to(tl.float16, bitcast=True)
    else:
        number = nibbles.to(DOT)
    return number


@triton.jit
def four_bit_product(
    left, exists, words, scales, zeros, column, N, K,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, GROUP: tl.constexpr, FLOAT4: tl.constexpr, OFFSET: tl.constexpr,
    DOT: tl.constexpr,
):  # fmt: skip
    """(BLOCK_M, BLOCK_N) float32: rows that begin at `left` (BLOCK_M,), where they exist, times `column`s of a weight.

    words (K / 8, N) int32; scales and zeros (K / GROUP, N), all rounded up. A block is 16 words: 8 planes of 16 elements along
    K, plane i in bits [4 i, 4 i + 4)."""
    word = tl.arange(0, 16)
    inside = column < N
    num_groups = tl.cdiv(K, GROUP)
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for block in tl.range(0, tl.cdiv(K, 128)):
        packed = tl.load(words + (block * 16 + word)[:, None] * N + column[None, :], inside[None, :], 0)
        part = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        total = tl.zeros((BLOCK_M,), tl.float32)
        for plane in tl.static_range(8):
            k = block * 128 + plane * 16 + word
            a = tl.load(left[:, None] + k[None, :], exists[:, None] & (k < K)[None, :], 0.0).to(DOT)
            number = _as_number((packed >> (4 * plane)) & 15, FLOAT4, OFFSET, DOT).to(DOT)
            part = tl.dot(a, number, part, input_precision="ieee")
            if not FLOAT4:
                total += tl.sum(a.to(tl.float32), 1)
            if (plane + 1) * 16 % GROUP == 0 or plane == 7:
                group = (block * 128 + plane * 16) // GROUP
                known = inside & (group < num_groups)
                if FLOAT4:
                    exponent = tl.load(scales + group * N + column, known, 0).to(tl.int32)
                    acc += part * (exponent << 23).to(tl.float32, bitcast=True)[None, :]
                else:
                    scale = tl.load(scales + group * N + column, known, 0.0).to(tl.float32)
                    zero = tl.load(zeros + group * N + column, known, 0).to(tl.float32) + OFFSET
                    acc += (part - total[:, None] * zero[None, :]) * scale[None, :]
                part = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
                total = tl.zeros((BLOCK_M,), tl.float32)
    return acc


@launchable(do_not_specialize=["M"])
def _four_bit_kernel(
    x, words, scales, zeros, bias, out, M, N, K, x_stride,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, GROUP: tl.constexpr, FLOAT4: tl.constexpr, OFFSET: tl.constexpr,
    BIAS: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """Program (columns, rows)."""
    row = (tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
    column = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    acc = four_bit_product(
        x + row * x_stride, row < M, words, scales, zeros, column, N, K, BLOCK_M, BLOCK_N, GROUP, FLOAT4, OFFSET, DOT
    )  # fmt: skip
    if BIAS:
        acc += tl.load(bias + column, column < N, 0.0).to(tl.float32)[None, :]
    target = out + row[:, None] * N + column[None, :]
    tl.store(target, acc.to(out.dtype.element_ty), (row < M)[:, None] & (column < N)[None, :])


def offset_of(weight: FourBit, dtype: torch.dtype) -> int:
    """Return what putting its bits into a mantissa of `dtype` adds to a weight's number."""
    if weight.zeros is None or dtype == torch.float32:
        return 0
    return 128 if dtype == torch.bfloat16 else 1024


def most_rows(weight: FourBit, device: torch.device) -> int:
    """Return the most rows of a tile. Before Hopper, whose products read shared memory, E2M1 numbers leave no registers for
    more."""
    return 32 if weight.zeros is None and capability(device) < 90 else 64


def linear_four_bit(x: Tensor, weight: FourBit, bias: Tensor | None = None) -> Tensor:
    """x (M, K) with contiguous rows -> (M, N)."""
    num_rows, inner = x.shape
    size = weight.words.shape[1]
    assert weight.inputs == inner
    assert x.stride(1) == 1
    out = torch.empty((num_rows, size), dtype=x.dtype, device=x.device)
    if not num_rows:
        return out
    block_m = min(most_rows(weight, x.device), max(16, triton.next_power_of_2(num_rows)))
    block_n = 32 if INTERPRETED or num_rows <= 64 else 64
    _four_bit_kernel[(triton.cdiv(size, block_n), triton.cdiv(num_rows, block_m))](
        x, weight.words, weight.scales, weight.zeros, bias, out, num_rows, size, inner, x.stride(0),
        BLOCK_M=block_m, BLOCK_N=block_n, GROUP=weight.group, FLOAT4=weight.zeros is None,
        OFFSET=offset_of(weight, x.dtype), BIAS=bias is not None, DOT=dot_dtype(x.dtype), num_warps=4, num_stages=6,
    )  # fmt: skip
    return out
