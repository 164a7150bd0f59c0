"""Makes weights of a byte or less floats again, or bytes, as they are loaded."""

from collections.abc import Sequence

import torch
from torch import Tensor

from kernels.packed import Int8Groups
from models.files.cuts import indices

MXFP4_GROUP = 32
"""Values that share a scale."""
_FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_FP4_VALUES = (*_FP4, *(-value for value in _FP4))
"""E2M1: sign, two bits of exponent, one of mantissa (OCP Microscaling Formats 1.0, section 5.3.3)."""
_E8M0_BIAS = 127


def from_scaled(
    values: Tensor, scales: Tensor, block: tuple[int, int], cut: Sequence[Sequence[slice]]
) -> Tensor:
    """`values` (rows, columns) of FP8 or INT8 are what `cut` leaves of a matrix, `scales` (..., ...) are those of all its blocks
    -> float32."""
    rows, columns = (index // size for index, size in zip(indices(cut), block, strict=True))
    return values.float() * scales.float()[rows][:, columns]


def from_mxfp4(blocks: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """`blocks` (..., G, 16) uint8, two values in a byte with the lower half first; scales (..., G) uint8, powers of two
    -> (..., 32 G) in `dtype`, exact in bfloat16."""
    exponents = scales.int() - _E8M0_BIAS
    return torch.ldexp(from_pairs(blocks, dtype), exponents[..., None]).to(dtype).flatten(-2)


def in_bytes(pairs: Tensor, scales: Tensor, group: int) -> Int8Groups:
    """`pairs` (..., N, K / 2) uint8 of two E2M1 numbers each, of which twice one is whole; scales (..., N, K / group) float32."""
    values = (2 * from_pairs(pairs, torch.float32)).to(torch.int8)
    return Int8Groups(values=values, scales=scales / 2, zeros=None, group=group)


def from_pairs(pairs: Tensor, dtype: torch.dtype) -> Tensor:
    """(..., B) uint8 of two E2M1 numbers each, the lower half first -> (..., 2 B) in `dtype`."""
    table = torch.tensor(_FP4_VALUES, dtype=dtype, device=pairs.device)
    return torch.stack((table[(pairs & 15).int()], table[(pairs >> 4).int()]), -1).flatten(-2)
