"""Blocks of a GGUF file's types of few bits, as whole numbers with scales that kernels multiply.

A weight is (number - zero) * scale, for 16 or 32 neighbouring inputs. Where scale and zero point are products of smaller numbers,
as K-quants have them, they are rounded to float16: by half of a thousandth each, at the most."""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from torch import Tensor

from kernels.packed import SYMMETRIC, FourBit, Int8Groups, Kind
from kernels.packing import from_nibbles
from models.formats import gguf_codebooks as codebooks

Bytes = np.ndarray
"""of uint8"""
_AT_ONCE: Final = 1 << 19
"""Weights that are decoded at a time, so that a processor's cache has them meanwhile."""
_MOST_ZERO: Final = 60_000.0
"""The largest zero point, of float16. Where it were larger, a group's weights are alike but for a thousandth."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Groups:
    """The numbers of some blocks (N, blocks), and what they are of."""

    numbers: np.ndarray
    """(N, blocks, inputs of a block) uint8 of 0..15, or int8"""
    scales: np.ndarray
    """(N, blocks, groups of a block) float32"""
    minima: np.ndarray | None = None
    """As `scales`: what is taken off each number times its scale; None: nothing, or 8 scales with four bits."""


@dataclass(frozen=True, slots=True)
class BlockType:
    """How a type's blocks are decoded."""

    decode: Callable[[Bytes], _Groups]
    """(N, blocks, bytes of a block) -> their numbers"""
    size: int
    """Bytes of a block."""
    inputs: int
    """Weights of a block."""
    group: int
    """Neighbouring inputs that share a scale."""
    bits: int
    """4 or 8: of a number, as it is kept."""
    has_minima: bool = False
    scales: torch.dtype = torch.float16

    @property
    def needs(self) -> frozenset[Kind]:
        """Return what `Ops.keeps` must have. Kernels without `int8_groups` round zero points to whole numbers."""
        own: Kind = "four_bit" if self.bits == 4 else "int8_groups"
        return frozenset((own, "int8_groups") if self.has_minima else (own,))


def matrix_of(kind: BlockType, rows: Bytes, columns: Sequence[slice]) -> FourBit | Int8Groups | None:
    """Return these columns, of whole groups, of rows (N, bytes). None where float16 does not hold the scales."""
    blocks = rows.reshape(len(rows), -1, kind.size)
    step = max(1, _AT_ONCE // max(1, blocks.shape[1] * kind.inputs))
    pieces = [blocks[at : at + step] for at in range(0, len(rows), step)]
    with ThreadPoolExecutor(torch.get_num_threads()) as threads:
        parts = list(threads.map(lambda piece: _part(kind, piece, columns), pieces))
    numbers, scales = (torch.cat([part[number] for part in parts]) for number in range(2))
    zeros = torch.cat([part[2] for part in parts]) if kind.has_minima else None
    if not (scales.isfinite().all() and (zeros is None or zeros.isfinite().all())):
        return None
    if kind.bits == 8:
        return Int8Groups(values=numbers, scales=scales, zeros=zeros, group=kind.group)
    return from_nibbles(numbers.T, scales.T, kind.group, None if zeros is None else zeros.T)


def _part(kind: BlockType, blocks: Bytes, columns: Sequence[slice]) -> tuple[Tensor, Tensor, Tensor]:
    """Return numbers (N, K), and scales and zero points (N, K / group) of some rows."""
    with np.errstate(all="ignore"):
        found = kind.decode(blocks)
        scales, zeros = found.scales, found.scales
        if kind.scales == torch.float16:
            scales = scales.astype(np.float16)
        if found.minima is not None:
            scales, zeros = _with_zeros(found.numbers, scales, found.minima)

    def cut(each: np.ndarray, unit: int) -> Tensor:
        flat = each.reshape(len(each), -1)
        runs = [flat[:, run.start // unit : -(-run.stop // unit)] for run in columns]
        return torch.from_numpy(np.concatenate(runs, 1))

    return cut(found.numbers, 1), cut(scales, kind.group).to(kind.scales), cut(zeros, kind.group)


def _with_zeros(numbers: np.ndarray, scales: np.ndarray, minima: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return scales and zero points of float16. Where a zero point is too large, the group's numbers become 0."""
    wide = scales.astype(np.float32)
    alike = np.abs(minima) > np.abs(wide) * _MOST_ZERO
    zeros = np.where(alike, 1, np.where(wide == 0, 0, minima / wide))
    if alike.any():
        numbers.reshape(*scales.shape, -1)[alike] = 0
        scales = np.where(alike, minima, wide).astype(np.float16)
    return scales, zeros.astype(np.float16)


def _half(blocks: Bytes, at: int) -> np.ndarray:
    """(..., bytes) -> (..., 1) float32 of the float16 that begins there."""
    return np.ascontiguousarray(blocks[..., at : at + 2]).view(np.float16).astype(np.float32)


def _spread(packed: Bytes, bits: int, width: int) -> Bytes:
    """Return the numbers of `bits` bits. The lowest bits of `width` bytes hold the first `width` numbers, the bits above them the
    next ones."""
    lines = np.ascontiguousarray(packed).reshape(*packed.shape[:-1], -1, width)
    made = np.empty((*lines.shape[:-1], 8 // bits, width), np.uint8)
    for place in range(8 // bits):
        # A shift of whole arrays is ten times as fast as one that is broadcast.
        made[..., place, :] = (lines >> np.uint8(bits * place)) & np.uint8((1 << bits) - 1)
    return made.reshape(*packed.shape[:-1], -1)


def _ones(packed: Bytes) -> Bytes:
    """Return a bit of each input, which lie one behind the other."""
    return np.unpackbits(packed, axis=-1, bitorder="little")


def _as_int8(numbers: Bytes, offset: int) -> np.ndarray:
    return numbers.view(np.int8) - np.int8(offset)


def _q8_0(blocks: Bytes) -> _Groups:
    return _Groups(numbers=blocks[..., 2:].view(np.int8), scales=_half(blocks, 0))


def _q4_0(blocks: Bytes) -> _Groups:
    return _Groups(numbers=_spread(blocks[..., 2:], 4, 16), scales=_half(blocks, 0))


def _q4_1(blocks: Bytes) -> _Groups:
    numbers = _spread(blocks[..., 4:], 4, 16)
    return _Groups(numbers=numbers, scales=_half(blocks, 0), minima=-_half(blocks, 2))


def _q5_0(blocks: Bytes) -> _Groups:
    numbers = _spread(blocks[..., 6:], 4, 16) | _ones(blocks[..., 2:6]) << 4
    return _Groups(numbers=_as_int8(numbers, 16), scales=_half(blocks, 0))


def _q5_1(blocks: Bytes) -> _Groups:
    numbers = _spread(blocks[..., 8:], 4, 16) | _ones(blocks[..., 4:8]) << 4
    return _Groups(numbers=numbers.view(np.int8), scales=_half(blocks, 0), minima=-_half(blocks, 2))


def _q2_k(blocks: Bytes) -> _Groups:
    both = blocks[..., :16]
    return _Groups(
        numbers=_spread(blocks[..., 16:80], 2, 32),
        scales=_half(blocks, 80) * (both & 15),
        minima=_half(blocks, 82) * (both >> 4),
    )


def _q3_k(blocks: Bytes) -> _Groups:
    low, high = _spread(blocks[..., 96:104], 4, 8), _spread(blocks[..., 104:108], 2, 4)
    scales = (low | high << 4).view(np.int8) - np.int8(32)
    numbers = _spread(blocks[..., 32:96], 2, 32) | _spread(blocks[..., :32], 1, 32) << 2
    return _Groups(numbers=numbers + np.uint8(SYMMETRIC - 4), scales=_half(blocks, 108) * scales)


def _of_six_bits(packed: Bytes) -> tuple[Bytes, Bytes]:
    """Return the eight scales and the eight minima of a block of Q4_K or Q5_K, which 12 bytes have."""
    first, second, last = packed[..., :4], packed[..., 4:8], packed[..., 8:]
    scales = np.concatenate((first & 63, last & 15 | first >> 2 & 48), -1)
    return scales, np.concatenate((second & 63, last >> 4 | second >> 2 & 48), -1)


def _q4_k(blocks: Bytes) -> _Groups:
    scales, minima = _of_six_bits(blocks[..., 4:16])
    numbers = _spread(blocks[..., 16:], 4, 32)
    return _Groups(numbers=numbers, scales=_half(blocks, 0) * scales, minima=_half(blocks, 2) * minima)


def _q5_k(blocks: Bytes) -> _Groups:
    scales, minima = _of_six_bits(blocks[..., 4:16])
    numbers = _spread(blocks[..., 48:], 4, 32) | _spread(blocks[..., 16:48], 1, 32) << 4
    return _Groups(
        numbers=numbers.view(np.int8), scales=_half(blocks, 0) * scales, minima=_half(blocks, 2) * minima
    )


def _q6_k(blocks: Bytes) -> _Groups:
    numbers = _spread(blocks[..., :128], 4, 64) | _spread(blocks[..., 128:192], 2, 32) << 4
    scales = _half(blocks, 208) * np.ascontiguousarray(blocks[..., 192:208]).view(np.int8)
    return _Groups(numbers=_as_int8(numbers, 32), scales=scales)


_LEVELS: Final = np.array((-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113), np.int8)
"""What the four bits of IQ4_NL and IQ4_XS mean."""
_TWICE_E2M1: Final = np.array((0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12), np.int8)


def _iq4_nl(blocks: Bytes) -> _Groups:
    return _Groups(numbers=_LEVELS[_spread(blocks[..., 2:], 4, 16)], scales=_half(blocks, 0))


def _iq4_xs(blocks: Bytes) -> _Groups:
    low, high = _spread(blocks[..., 4:8], 4, 1), _spread(blocks[..., 2:4], 2, 1)
    scales = (low | high << 4).view(np.int8) - np.int8(32)
    return _Groups(numbers=_LEVELS[_spread(blocks[..., 8:], 4, 16)], scales=_half(blocks, 0) * scales)


def _mxfp4(blocks: Bytes) -> _Groups:
    scales = np.ldexp(np.float32(1), blocks[..., :1].astype(np.int32) - 128)
    return _Groups(numbers=_TWICE_E2M1[_spread(blocks[..., 1:], 4, 16)], scales=scales)


def _nvfp4(blocks: Bytes) -> _Groups:
    bits = blocks[..., :4].astype(np.int32)
    exponents, mantissas = bits >> 3 & 15, bits & 7
    normal = np.where(exponents == 0, mantissas, mantissas + 8)
    scales = np.ldexp(normal.astype(np.float32), np.maximum(exponents, 1) - 11)
    numbers = _TWICE_E2M1[_spread(blocks[..., 4:], 4, 8)]
    return _Groups(numbers=numbers, scales=np.where(bits == 127, np.float32(0), scales))


def _ternary(at: int, numbers: Callable[[Bytes], Bytes]) -> Callable[[Bytes], _Groups]:
    """Return how -1, 0 and 1 are decoded, where `numbers` returns 0, 1 and 2 and the scale begins at `at`."""

    def decode(blocks: Bytes) -> _Groups:
        return _Groups(numbers=numbers(blocks) + np.uint8(SYMMETRIC - 1), scales=_half(blocks, at))

    return decode


def _digits(blocks: Bytes) -> Bytes:
    """Return the five ternary digits of each byte of TQ1_0, of which the last bytes have four."""
    parts: list[Bytes] = []
    for packed, width, count in (
        (blocks[..., :32], 32, 5),
        (blocks[..., 32:48], 16, 5),
        (blocks[..., 48:52], 4, 4),
    ):
        lines = packed.reshape(*packed.shape[:-1], -1, 1, width)
        powers = np.array([3**place for place in range(count)], np.uint8)[:, None]
        digits = (lines * powers).astype(np.uint16) * 3 >> 8
        parts.append(digits.astype(np.uint8).reshape(*packed.shape[:-1], -1))
    return np.concatenate(parts, -1)


def _from_table(
    numbers: Callable[[Bytes], np.ndarray], scales_of: Callable[[Bytes], np.ndarray]
) -> Callable[[Bytes], _Groups]:
    return lambda blocks: _Groups(numbers=numbers(blocks), scales=scales_of(blocks))


def _odd(steps: np.ndarray) -> np.ndarray:
    return (2 * steps.astype(np.int32) + 1).astype(np.float32)


def _scales_of_iq1_m(blocks: Bytes) -> np.ndarray:
    words = np.ascontiguousarray(blocks[..., 48:]).view(np.uint16)
    high = words >> np.uint16(12)
    own = high[..., :1] | high[..., 1:2] << 4 | high[..., 2:3] << 8 | high[..., 3:] << 12
    steps = words[..., None] >> np.array((0, 3, 6, 9), np.uint16) & 7
    return own.view(np.float16).astype(np.float32) / 8 * _odd(steps.reshape(*words.shape[:-1], -1))


def _wide(
    numbers: Callable[[Bytes], np.ndarray], size: int, group: int, scales_of: Callable[[Bytes], np.ndarray]
) -> BlockType:
    """A type whose scales are too small for float16."""
    return BlockType(_from_table(numbers, scales_of), size, 256, group, 8, scales=torch.float32)


BLOCK_TYPES: Final = {
    "Q8_0": BlockType(_q8_0, 34, 32, 32, 8),
    "Q4_0": BlockType(_q4_0, 18, 32, 32, 4),
    "Q4_1": BlockType(_q4_1, 20, 32, 32, 4, has_minima=True),
    "Q5_0": BlockType(_q5_0, 22, 32, 32, 8),
    "Q5_1": BlockType(_q5_1, 24, 32, 32, 8, has_minima=True),
    "Q2_K": BlockType(_q2_k, 84, 256, 16, 4, has_minima=True),
    "Q3_K": BlockType(_q3_k, 110, 256, 16, 4),
    "Q4_K": BlockType(_q4_k, 144, 256, 32, 4, has_minima=True),
    "Q5_K": BlockType(_q5_k, 176, 256, 32, 8, has_minima=True),
    "Q6_K": BlockType(_q6_k, 210, 256, 16, 8),
    "IQ4_NL": BlockType(_iq4_nl, 18, 32, 32, 8),
    "IQ4_XS": BlockType(_iq4_xs, 136, 256, 32, 8),
    "IQ3_S": _wide(
        codebooks.iq3_s, 110, 32, lambda blocks: _half(blocks, 0) * _odd(_spread(blocks[..., 106:], 4, 1))
    ),
    "IQ3_XXS": _wide(
        codebooks.iq3_xxs, 98, 32, lambda blocks: _half(blocks, 0) / 4 * _odd(blocks[..., 69::4] >> 4)
    ),
    "IQ2_S": _wide(
        codebooks.iq2_s, 82, 16, lambda blocks: _half(blocks, 0) / 8 * _odd(_spread(blocks[..., 74:], 4, 1))
    ),
    "IQ2_XS": _wide(
        codebooks.iq2_xs, 74, 16, lambda blocks: _half(blocks, 0) / 8 * _odd(_spread(blocks[..., 66:], 4, 1))
    ),
    "IQ2_XXS": _wide(
        codebooks.iq2_xxs, 66, 32, lambda blocks: _half(blocks, 0) / 8 * _odd(blocks[..., 9::8] >> 4)
    ),
    "IQ1_S": _wide(
        codebooks.iq1_s, 50, 32, lambda blocks: _half(blocks, 0) / 8 * _odd(blocks[..., 35::2] >> 4 & 7)
    ),
    "IQ1_M": _wide(codebooks.iq1_m, 56, 16, _scales_of_iq1_m),
    "TQ1_0": BlockType(_ternary(52, _digits), 54, 256, 256, 4),
    "TQ2_0": BlockType(_ternary(64, lambda blocks: _spread(blocks[..., :64], 2, 32)), 66, 256, 256, 4),
    "MXFP4": BlockType(_mxfp4, 17, 32, 32, 8, scales=torch.bfloat16),
    "NVFP4": BlockType(_nvfp4, 36, 64, 16, 8),
}
"""The types that are multiplied as they are stored."""
