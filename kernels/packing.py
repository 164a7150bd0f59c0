"""4-bit weights as AutoAWQ, GPTQ, compressed-tensors, MXFP4 and NVFP4 store them, brought into the layout that kernels read."""

from dataclasses import replace

import torch
from torch import Tensor
from torch.nn import functional as F

from kernels.packed import BLOCK, PLANE, SYMMETRIC, FourBit

_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""The column that each nibble of an AWQ word holds, from the lowest bits."""
_IN_ORDER = tuple(range(8))
NVFP4_GROUP = 16
"""Inputs that share a scale of E4M3."""


def from_awq(qweight: Tensor, qzeros: Tensor, scales: Tensor, group: int) -> FourBit:
    """AWQ: qweight (K, N / 8) and qzeros (K / group, N / 8) int32, scales (K / group, N)."""
    nibbles, zeros = (_columns(x, _AWQ_ORDER) for x in (qweight, qzeros))
    return _four_bit(nibbles, zeros, scales, group)


def from_gptq(qweight: Tensor, qzeros: Tensor, scales: Tensor, group: int, zero_offset: int = 1) -> FourBit:
    """GPTQ without activation order: qweight (K / 8, N) int32, low bits first; qzeros (K / group, N / 8), to which checkpoints of
    the first format add 1; scales (K / group, N)."""
    zeros = _columns(qzeros, _IN_ORDER) + zero_offset
    return _four_bit(_columns(qweight.T, _IN_ORDER).T, zeros, scales, group)


def from_compressed(packed: Tensor, zero_point: Tensor | None, scales: Tensor, group: int) -> FourBit:
    """compressed-tensors: packed (N, K / 8) and zero points (N / 8, K / group) int32, low bits first; scales (N, K / group)."""
    if zero_point is None:
        zeros = torch.full(scales.T.shape, SYMMETRIC, dtype=torch.uint8, device=scales.device)
    else:
        zeros = _columns(zero_point.T, _IN_ORDER)
    return _four_bit(_columns(packed, _IN_ORDER).T, zeros, scales.T, group)


def from_nibbles(nibbles: Tensor, scales: Tensor, group: int, zeros: Tensor | None = None) -> FourBit:
    """Nibbles (K, N) uint8, scales (K / group, N), and as many zero points, which need not be whole; None: symmetric."""
    if zeros is None:
        return _four_bit(nibbles, torch.full(scales.shape, SYMMETRIC, dtype=torch.uint8), scales, group)
    return replace(_four_bit(nibbles, zeros, scales, group), has_whole_zeros=False)


def from_mxfp4(blocks: Tensor, exponents: Tensor) -> FourBit:
    """`blocks` (..., N, K / 2) uint8, the even element in the low bits; exponents (..., N, K / 32) uint8."""
    # Scales of 2^-63 to 2^63 are all that kernels hold.
    return _floats(blocks, exponents.clamp(64, 190), PLANE, None)


def from_nvfp4(blocks: Tensor, scales: Tensor, factors: Tensor) -> FourBit:
    """`blocks` as above; scales (..., N, K / 16) float8_e4m3fn, and factors (..., N) float32, by which they are multiplied."""
    return _floats(blocks, scales.view(torch.uint8), NVFP4_GROUP, factors)


def _floats(blocks: Tensor, scales: Tensor, group: int, factors: Tensor | None) -> FourBit:
    nibbles = torch.stack((blocks & 15, blocks >> 4), -1).flatten(-2).mT
    count = BLOCK // group
    padded = F.pad(scales, (0, -scales.shape[-1] % count)).unflatten(-1, (-1, count)).transpose(-3, -2)
    return FourBit(
        words=_pack(nibbles),
        scales=padded.contiguous(),
        group=group,
        inputs=nibbles.shape[-2],
        factors=factors,
    )


def _four_bit(nibbles: Tensor, zeros: Tensor, scales: Tensor, group: int) -> FourBit:
    assert zeros.shape == scales.shape
    return FourBit(
        words=_pack(nibbles),
        scales=torch.stack((scales, zeros.to(scales.dtype)), -1),
        group=group,
        inputs=nibbles.shape[0],
    )


def _columns(words: Tensor, order: tuple[int, ...]) -> Tensor:
    """(R, N / 8) int32 -> (R, N) uint8; nibble i of a word is column order[i] of its eight."""
    shifts = torch.tensor([4 * order.index(i) for i in range(8)], dtype=torch.int32, device=words.device)
    return ((words[..., None] >> shifts) & 15).flatten(1).to(torch.uint8)


def _pack(nibbles: Tensor) -> Tensor:
    """(..., K, N) of 0..15 -> (..., K / 128, N, 32) int16, K rounded up to a multiple of 128."""
    planes = (
        F.pad(nibbles, (0, 0, 0, -nibbles.shape[-2] % BLOCK)).unflatten(-2, (-1, BLOCK // PLANE, PLANE)).mT
    )
    first, second, third, last = (each.to(torch.uint8) for each in planes.unbind(-3))
    return torch.stack((first | second << 4, third | last << 4), -1).flatten(-2).view(torch.int16)
