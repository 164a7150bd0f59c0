"""Activations of 8 bits, with which weights of 8 bits are multiplied, and how they are made, in pure PyTorch."""

from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.packed import SCALE_BLOCK, EightBit, Weight

LARGEST = {torch.float8_e4m3fn: 448.0, torch.int8: 127.0}
"""Magnitudes of the dtypes that activations and KV are rounded to."""


@dataclass(frozen=True, slots=True)
class Rounding:
    """The numbers that activations are rounded to."""

    dtype: torch.dtype
    """float8_e4m3fn or int8"""
    group: int = 0
    """Neighbours in a row that share a scale; 0: all of it."""
    scale: Tensor | None = None
    """(1,) float32, of every row, as a checkpoint gives it; None: what largest magnitudes ask for. Without groups."""


@dataclass(frozen=True, slots=True)
class Rounded:
    """Rows of 8 bits, and what to multiply them with."""

    values: Tensor
    """(T, K) float8_e4m3fn or int8"""
    scales: Tensor
    """float32: (T,), (T, K / group), or (1,)."""
    dtype: torch.dtype
    """What they were before, and what products with them are."""


Activations = Tensor | Rounded


def rounding_of(weight: Weight) -> Rounding | None:
    """Return what products with `weight` round the other side to, or None where they do not round it."""
    if not isinstance(weight, EightBit):
        return None
    scale = None if weight.by_blocks else weight.input_scale
    return Rounding(weight.values.dtype, SCALE_BLOCK if weight.by_blocks else 0, scale)


def round_to(x: Tensor, how: Rounding) -> Rounded:
    """Round x (T, K)."""
    if how.scale is not None:
        return Rounded(_stored(x.float() / how.scale, how.dtype), how.scale, x.dtype)
    values, scales = rounded(x.reshape(-1, how.group or x.shape[1]), how.dtype)
    return Rounded(values.view(x.shape), scales.view(len(x), -1) if how.group else scales, x.dtype)


def rounded(vectors: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """(N, D) -> (N, D) in `dtype`, (N,) float32 to multiply them with; 1 for vectors of zeros."""
    values, limit = vectors.float(), LARGEST[dtype]
    largest = values.abs().amax(-1)
    scales = torch.where(largest > 0, largest / limit, 1.0)
    return _stored(values / scales[:, None], dtype), scales


def _stored(values: Tensor, dtype: torch.dtype) -> Tensor:
    values = values.clamp(-LARGEST[dtype], LARGEST[dtype])
    return (values.round() if dtype == torch.int8 else values).to(dtype)


def as_floats(x: Activations) -> Tensor:
    """Return the numbers that they stand for: (T, K)."""
    if isinstance(x, Tensor):
        return x
    scales = x.scales if x.scales.dim() == 2 else x.scales[:, None]
    spread = scales.repeat_interleave(x.values.shape[1] // scales.shape[1], 1)
    return (x.values.float() * spread).to(x.dtype)
