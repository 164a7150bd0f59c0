"""Products with 4-bit weights: integers with a scale and a zero point for each group (AWQ, GPTQ), MXFP4, or NVFP4.

`kernels.packing` brings checkpoints into the layout read here. For few rows memory-bound; floor: weight and scales are read once.
A tile's weights of 128 inputs lie in one piece and are copied to shared memory some pieces ahead, scales with them; scales are
applied to the sum of their group."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.packed import BLOCK, FourBit
from kernels.triton.launching import launchable
from kernels.triton.platform import INTERPRETED, capability, cdiv, dot_dtype, next_power_of_2
from kernels.triton.split import add_parts, parts_of
from kernels.triton.unpack import float_planes, from_e4m3, integer_planes

_FLOATS_ARE_SMALL = tl.constexpr(2.0**64)
"""What `float_planes` divides by."""
_ONES = tl.constexpr(0x7F7F7F7F)
"""Four exponents of 1."""
_BLACKWELL = 100
MOST_ROWS = 64
"""Rows of a tile of any weight: accumulators of more leave no registers for some."""


@triton.jit
def _scale_and_zero(scales, k, column, N, K, GROUP: tl.constexpr, SCALE: tl.constexpr):
    """(BLOCK_N, 1) each, of input k's group: float32."""
    pair = tl.load(scales + k // GROUP * N + column, (column < N) & (k < K), 0)
    if tl.float32 == SCALE:
        scale, zero = pair.to(tl.int32), (pair >> 32).to(tl.int32)
    else:
        scale, zero = pair.to(tl.int16), (pair >> 16).to(tl.int16)
    scale, zero = scale.to(SCALE, bitcast=True).to(tl.float32), zero.to(SCALE, bitcast=True).to(tl.float32)
    return scale[:, None], zero[:, None]


@triton.jit
def _in_small_groups(
    packed, scales, block, start, column, inside, N, K, GROUP: tl.constexpr, SCALE: tl.constexpr, DOT: tl.constexpr
):  # fmt: skip
    """Return the planes of `packed` and a scale of each, (BLOCK_N, 1) float32, which is less than zero for floats:
    `four_bit_product` adds up."""
    if tl.float8e4nv == SCALE:
        first_four = tl.load(scales + (block * N + column) * 2, inside, 0)[:, None]
        last_four = tl.load(scales + (block * N + column) * 2 + 1, inside, 0)[:, None]
        w0, w1, w2, w3 = float_planes(packed, tl.full((packed.shape[0], 1), _ONES, tl.int32), DOT)
        scale0, scale1 = -from_e4m3(first_four, start // 16), -from_e4m3(first_four, start // 16 + 2)
        scale2, scale3 = -from_e4m3(last_four, start // 16), -from_e4m3(last_four, start // 16 + 2)
    else:
        k = block * 128 + start
        scale0, zero0 = _scale_and_zero(scales, k, column, N, K, GROUP, SCALE)
        scale1, zero1 = _scale_and_zero(scales, k + 32, column, N, K, GROUP, SCALE)
        scale2, zero2 = _scale_and_zero(scales, k + 64, column, N, K, GROUP, SCALE)
        scale3, zero3 = _scale_and_zero(scales, k + 96, column, N, K, GROUP, SCALE)
        w0, w1, w2, w3 = integer_planes(packed, zero0, zero1, zero2, zero3, DOT)
    return w0, w1, w2, w3, scale0, scale1, scale2, scale3


@triton.jit
def _pair(first, second):
    """(N, S) twice -> (N, 2 S)."""
    return tl.reshape(tl.permute(tl.join(first, second), (0, 2, 1)), (first.shape[0], 2 * first.shape[1]))


@triton.jit
def _four(w0, w1, w2, w3):
    """(N, S) four times -> (N, 4 S), in registers."""
    joined = tl.join(tl.join(w0, w2), tl.join(w1, w3))
    return tl.reshape(tl.permute(joined, (0, 2, 3, 1)), (w0.shape[0], 4 * w0.shape[1]))


@triton.jit
def _times(w, left, exists, k, K, WHOLE: tl.constexpr, DOT: tl.constexpr):
    """(BLOCK_N, BLOCK_M): w (BLOCK_N, S) times the inputs from `k` on of the rows that begin at `left`."""
    inputs = k + tl.arange(0, w.shape[1])
    there = exists[:, None] if WHOLE else exists[:, None] & (inputs < K)[None, :]
    x = tl.load(left[:, None] + inputs[None, :], there, 0.0).to(DOT)
    return tl.dot(w, x.T, input_precision="ieee")


@triton.jit
def four_bit_product(
    left, exists, words, scales, column, first, last, N, K,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, GROUP: tl.constexpr, SCALE: tl.constexpr, WHOLE: tl.constexpr,
    DOT: tl.constexpr,
):  # fmt: skip
    """(BLOCK_N, BLOCK_M) float32: `column`s of a weight times rows that begin at `left` (BLOCK_M,), where they exist, over the
    blocks of 128 inputs from `first` to before `last`.

    words (K / 128, N, 32); scales (K / GROUP, N), each a SCALE and a zero point, or (K / 128, N), each four exponents or eight of
    E4M3. WHOLE: K is a multiple of 128."""
    SIZE: tl.constexpr = min(GROUP, 32)
    inside = column < N
    tile = words + column[:, None] * 32 + tl.arange(0, SIZE)[None, :]
    acc = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    for block in tl.range(first, last):
        for start in tl.static_range(0, 32, SIZE):
            k = block * 128 + start
            packed = tl.load(tile + block * N * 32 + start, inside[:, None], 0)
            if tl.uint8 == SCALE:
                exponents = tl.load(scales + block * N + column, inside, 0)
                w0, w1, w2, w3 = float_planes(packed, exponents[:, None], DOT)
                # Triton would make an addition part of the product, whose instructions would then wait for each other.
                acc -= _times(_four(w0, w1, w2, w3), left, exists, k, K, WHOLE, DOT)
            elif GROUP >= 128:
                scale, zero = _scale_and_zero(scales, k, column, N, K, GROUP, SCALE)
                w0, w1, w2, w3 = integer_planes(packed, zero, zero, zero, zero, DOT)
                acc += _times(_four(w0, w1, w2, w3), left, exists, k, K, WHOLE, DOT) * scale
            elif GROUP == 64:
                scale0, zero0 = _scale_and_zero(scales, k, column, N, K, GROUP, SCALE)
                scale1, zero1 = _scale_and_zero(scales, k + 64, column, N, K, GROUP, SCALE)
                w0, w1, w2, w3 = integer_planes(packed, zero0, zero0, zero1, zero1, DOT)
                acc += _times(_pair(w0, w1), left, exists, k, K, WHOLE, DOT) * scale0
                acc += _times(_pair(w2, w3), left, exists, k + 64, K, WHOLE, DOT) * scale1
            else:
                w0, w1, w2, w3, scale0, scale1, scale2, scale3 = _in_small_groups(
                    packed, scales, block, start, column, inside, N, K, GROUP, SCALE, DOT
                )
                acc += _times(w0, left, exists, k, K, WHOLE, DOT) * scale0
                acc += _times(w1, left, exists, k + 32, K, WHOLE, DOT) * scale1
                acc += _times(w2, left, exists, k + 64, K, WHOLE, DOT) * scale2
                acc += _times(w3, left, exists, k + 96, K, WHOLE, DOT) * scale3
    return acc * -_FLOATS_ARE_SMALL if tl.uint8 == SCALE or tl.float8e4nv == SCALE else acc


@launchable(do_not_specialize=["M", "parts"])
def _four_bit_kernel(
    x, words, scales, factors, bias, out, M, N, K, x_stride, parts,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, GROUP: tl.constexpr, SCALE: tl.constexpr, WHOLE: tl.constexpr,
    BIAS: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """Program (columns, rows, part). out (parts, M, N): sums over a part of K each."""
    row = (tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
    column = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    part, num_blocks = tl.program_id(2), tl.cdiv(K, 128)
    acc = four_bit_product(
        x + row * x_stride, row < M, words, scales, column, num_blocks * part // parts, num_blocks * (part + 1) // parts, N, K,
        BLOCK_M, BLOCK_N, GROUP, SCALE, WHOLE, DOT,
    )  # fmt: skip
    if factors is not None:
        acc *= tl.load(factors + column, column < N, 0.0)[:, None]
    if BIAS:
        acc += tl.load(bias + column, column < N, 0.0).to(tl.float32)[:, None]
    target = out + (part.to(tl.int64) * M + row)[None, :] * N + column[:, None]
    tl.store(target, acc.to(out.dtype.element_ty), (row < M)[None, :] & (column < N)[:, None])


_SCALES = {
    torch.float32: tl.float32,
    torch.bfloat16: tl.bfloat16,
    torch.float16: tl.float16,
    torch.uint8: tl.uint8,
}


def scale_words(weight: FourBit) -> tuple[Tensor, tl.dtype]:
    """Return (.., N) integers that an output's scales and zero points, or its exponents, are stored in, or (.., N, 2) that E4M3's
    are, and the dtype of a scale."""
    if weight.factors is not None:
        return weight.scales.view(torch.int32), tl.float8e4nv
    wide = torch.int64 if weight.scales.dtype == torch.float32 else torch.int32
    return weight.scales.view(wide)[..., 0], _SCALES[weight.scales.dtype]


def dtype_of_products(weight: FourBit, dtype: torch.dtype) -> tl.dtype:
    """Return what weights become and rows of `dtype` are multiplied in: float16 does not hold MXFP4's scales."""
    return tl.float32 if weight.is_float and dtype == torch.float16 else dot_dtype(dtype)


def most_rows(weight: FourBit, device: torch.device) -> int:
    """Return the most rows of a tile. For Blackwell Triton compiles products of 64 rows over 16 inputs to nothing."""
    return MOST_ROWS // 2 if weight.group == 16 and capability(device) >= _BLACKWELL else MOST_ROWS


def _rows_of_tile(num_rows: int, weight: FourBit, device: torch.device) -> int:
    """Before Hopper, and with the several sums of small groups, 128 rows would need more registers than there are."""
    one_sum = weight.group >= 64 or (weight.is_float and weight.factors is None)
    most = 128 if capability(device) >= 90 and one_sum else most_rows(weight, device)
    return min(most, max(16, next_power_of_2(num_rows)))


def warps_of(block_m: int) -> int:
    """Return how many warps a tile of so many rows needs, lest its sums take the registers of its weights."""
    return 4 if block_m <= 32 else 8


def linear_four_bit(x: Tensor, weight: FourBit, bias: Tensor | None = None) -> Tensor:
    """`x` (M, K) with contiguous rows -> (M, N)."""
    num_rows, inner = x.shape
    size = weight.shape[0]
    assert weight.inputs == inner
    assert x.stride(1) == 1
    out = torch.empty((num_rows, size), dtype=x.dtype, device=x.device)
    if not num_rows:
        return out
    scales, scale = scale_words(weight)
    block_m, block_n = _rows_of_tile(num_rows, weight, x.device), 32 if INTERPRETED else 128
    tiles = cdiv(size, block_n), cdiv(num_rows, block_m)
    parts = parts_of(tiles[0] * tiles[1], len(weight.words), x.device)
    sums = out if parts == 1 else torch.empty((parts, num_rows, size), dtype=torch.float32, device=x.device)
    _four_bit_kernel[(*tiles, parts)](
        x, weight.words, scales, weight.factors, None if parts > 1 else bias, sums, num_rows, size, inner, x.stride(0), parts,
        BLOCK_M=block_m, BLOCK_N=block_n, GROUP=weight.group, SCALE=scale, WHOLE=inner % BLOCK == 0,
        BIAS=parts == 1 and bias is not None, DOT=dtype_of_products(weight, x.dtype), num_warps=warps_of(block_m),
        num_stages={16: 6, 128: 3}.get(block_m, 4),
    )  # fmt: skip
    if parts > 1:
        add_parts(sums, bias, out)
    return out
