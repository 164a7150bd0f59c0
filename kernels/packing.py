"""4-bit weights of checkpoints, and the one layout that kernels read: what each nibble means is the checkpoint's business.

Layout of (N, K) weights: (K / 8, N) int32 words. Each 128 elements of a column are 16 words; word j has in bits [4 i, 4 i + 4)
element 16 i + j, so that one shift and one mask of 16 words give 16 neighbours."""

from dataclasses import dataclass

import torch
from torch import Tensor

_BLOCK, _WORDS = 128, 16
_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""The column that each nibble of an AWQ word holds, from the lowest bits."""
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Magnitudes of the OCP Microscaling format's 4-bit numbers, by their three lower bits."""


@dataclass(frozen=True, slots=True)
class FourBit:
    """A weight (N, K), K a multiple of 128: (nibble - zero) * scale; or, without zeros, E2M1 numbers times powers of two."""

    words: Tensor
    """(K / 8, N) int32"""
    scales: Tensor
    """(K / group, N): floating point, or uint8 exponents with a bias of 127."""
    zeros: Tensor | None
    """(K / group, N) uint8"""
    group: int
    """Elements along K that share a scale: 32, 64, or a multiple of 128."""


def from_awq(qweight: Tensor, qzeros: Tensor, scales: Tensor) -> FourBit:
    """AWQ: qweight (K, N / 8) and qzeros (K / group, N / 8) int32, scales (K / group, N)."""
    nibbles, zeros = (_columns(x, _AWQ_ORDER) for x in (qweight, qzeros))
    return FourBit(_pack(nibbles), scales.contiguous(), zeros, nibbles.shape[0] // scales.shape[0])


def from_gptq(qweight: Tensor, qzeros: Tensor, scales: Tensor, zero_offset: int = 1) -> FourBit:
    """GPTQ without activation order: qweight (K / 8, N) int32, low bits first; qzeros (K / group, N / 8), to which checkpoints of
    the first format add 1; scales (K / group, N)."""
    shifts = torch.arange(8, dtype=torch.int32, device=qweight.device) * 4
    nibbles = ((qweight[:, None] >> shifts[:, None]) & 15).flatten(0, 1).to(torch.uint8)
    zeros = _columns(qzeros, tuple(range(8))) + zero_offset
    return FourBit(
        _pack(nibbles), scales.contiguous(), zeros.to(torch.uint8), nibbles.shape[0] // scales.shape[0]
    )


def from_mxfp4(blocks: Tensor, exponents: Tensor) -> FourBit:
    """blocks (N, K / 2) uint8, the even element in the low bits; exponents (N, K / 32) uint8."""
    nibbles = torch.stack((blocks & 15, blocks >> 4), -1).flatten(1)
    return FourBit(_pack(nibbles.T), exponents.T.contiguous(), None, 32)


def unpack(weight: FourBit) -> Tensor:
    """(N, K) float32: what the words mean."""
    words = weight.words.unflatten(0, (-1, _WORDS))
    shifts = torch.arange(8, dtype=torch.int32, device=words.device)[None, :, None, None] * 4
    nibbles = ((words[:, None] >> shifts) & 15).flatten(0, 2)
    if weight.zeros is None:
        table = torch.tensor([*_E2M1, *(-x for x in _E2M1)], device=words.device)
        values, scales = table[nibbles.long()], torch.exp2(weight.scales.float() - 127)
    else:
        values = nibbles.float() - weight.zeros.float().repeat_interleave(weight.group, 0)
        scales = weight.scales.float()
    return (values * scales.repeat_interleave(weight.group, 0)).T


def _columns(words: Tensor, order: tuple[int, ...]) -> Tensor:
    """(R, N / 8) int32 -> (R, N) uint8; nibble i of a word is column order[i] of its eight."""
    shifts = torch.tensor([4 * order.index(i) for i in range(8)], dtype=torch.int32, device=words.device)
    return ((words[..., None] >> shifts) & 15).flatten(1).to(torch.uint8)


def _pack(nibbles: Tensor) -> Tensor:
    """(K, N) of 0..15 -> (K / 8, N) int32"""
    assert nibbles.shape[0] % _BLOCK == 0, f"{nibbles.shape[0]} inputs are no multiple of {_BLOCK}"
    planes = nibbles.to(torch.int64).unflatten(0, (-1, 8, _WORDS))
    shifts = torch.arange(8, device=nibbles.device)[None, :, None, None] * 4
    words = (planes << shifts).sum(1).flatten(0, 1)
    return torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32)
