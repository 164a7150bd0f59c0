"""Latents of 8 bits as kernels read them: numbers of groups that share a scale, and the rotated part of keys in bfloat16."""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.kv_parts import ScaledLatents
from kernels.ops import Latents
from kernels.triton.eight_bits import STORED_DTYPES


@triton.jit
def scaled(
    numbers, scales, place, there, number, STORED: tl.constexpr, EACH: tl.constexpr, SCALES: tl.constexpr
):
    """(N, D) int8 of vectors at `place` (N,) -> float32. `number` (D,) are those with scales, EACH of which share one of a
    vector's SCALES."""
    in_vector = tl.minimum(number // EACH, SCALES - 1)
    scale = tl.load(scales + place[:, None] * SCALES + in_vector[None, :], there[:, None], 0.0)
    return numbers.to(STORED, bitcast=True).to(tl.float32) * scale


@triton.jit
def latent_tile(
    kv, rotated_kv, kv_scales, place, there, column, rotated, RANK: tl.constexpr, ROTATED: tl.constexpr,
    STRIDE: tl.constexpr, STORED: tl.constexpr, EACH: tl.constexpr, SCALES: tl.constexpr,
):  # fmt: skip
    """Return latents (N, columns) at `place` (N,), and the rotated parts behind them, zeros where there is nothing. STORED: the
    type of 8 bits; None: they are floats."""
    is_latent, is_key = (
        there[:, None] & (column < RANK)[None, :],
        there[:, None] & (rotated < ROTATED)[None, :],
    )
    latent = tl.load(kv + place[:, None] * STRIDE + column[None, :], is_latent, 0)
    if STORED is None:
        key = tl.load(kv + place[:, None] * STRIDE + RANK + rotated[None, :], is_key, 0)
    else:
        latent = scaled(latent, kv_scales, place, there, column, STORED, EACH, SCALES)
        bits = tl.load(rotated_kv + place[:, None] * (STRIDE // 2) + RANK // 2 + rotated[None, :], is_key, 0)
        # The interpreter's own bfloat16 is wrong.
        key = (bits.to(tl.int32) << 16).to(tl.float32, bitcast=True)
    return latent, key


@dataclass(frozen=True, slots=True)
class StoredLatents:
    """A layer's latents as a launch takes them."""

    numbers: Tensor
    rotated: Tensor
    """What the rotated parts are read from: the same memory."""
    scales: Tensor | None
    stored: tl.dtype | None
    """The type of 8 bits of the numbers, which are int8 here. None: they are floats, and so is the rotated part."""
    each: int
    num_scales: int
    stride: int
    """From one vector to the next."""
    size: int
    """Numbers that are stored of a vector, two for each of bfloat16."""

    @classmethod
    def of(cls, kv_layer: Latents) -> "StoredLatents":
        if isinstance(kv_layer, Tensor):
            return cls(kv_layer, kv_layer, None, None, 1, 1, kv_layer.stride(3), kv_layer.shape[4])
        return cls(
            numbers=kv_layer.data.view(torch.int8),
            rotated=kv_layer.data.view(torch.int16),
            scales=kv_layer.scales,
            stored=STORED_DTYPES[kv_layer.data.dtype],
            each=kv_layer.num_scaled // kv_layer.scales.shape[4],
            num_scales=kv_layer.scales.shape[4],
            stride=kv_layer.data.stride(3),
            size=kv_layer.data.shape[4],
        )


def by_slot(kv_layer: Latents) -> Latents:
    """Return the same with each slot as a block of one token."""
    if isinstance(kv_layer, ScaledLatents):
        return ScaledLatents(_by_slot(kv_layer.data), _by_slot(kv_layer.scales), kv_layer.kept)
    return _by_slot(kv_layer)


def _by_slot(part: Tensor) -> Tensor:
    num_blocks, _, _, block_size, size = part.shape
    strides = (part.stride(3),) * 4
    return part.as_strided((num_blocks * block_size, 1, 1, 1, size), (*strides, 1))
