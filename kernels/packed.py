"""Weights that stay as small as a checkpoint stores them, in the layouts that kernels read. `as_float` says what they mean.

All have the shape (N, K) of N outputs and K inputs. S experts have one dimension more, in front."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import gcd
from typing import Literal

import torch
from torch import Tensor

Kind = Literal["float8", "int8", "int8_groups", "four_bit", "mxfp4", "nvfp4", "half"]
"""`half` are matrices of bfloat16 or float16, whatever the model computes in; `int8_groups` are `Int8Groups`; `four_bit`, `mxfp4`
and `nvfp4` are `FourBit` of integers, and of E2M1 numbers with either kind of scales."""
SCALE_BLOCK = 128
"""Rows and columns that share a scale in 8-bit weights scaled by blocks."""
FLOAT8_CAPABILITY = 90
"""Ten times the compute capability from which Triton's kernels have float8."""
BLOCK, PLANE = 128, 32
"""Each 128 inputs of 4-bit weights are four planes of 32."""
SYMMETRIC = 8
"""The zero point of symmetric 4-bit weights, whose nibbles are their numbers and this."""
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Magnitudes of the OCP Microscaling format's 4-bit numbers, by their three lower bits."""


@dataclass(frozen=True, slots=True)
class EightBit:
    """Numbers times scales. K is a multiple of 16, or of 128 where blocks share a scale."""

    values: Tensor
    """(N, K) float8_e4m3fn or int8"""
    scales: Tensor
    """float32: (N,), or (N / 128, K / 128), rounded up."""
    input_scale: Tensor | None = None
    """(1,) float32: what inputs are divided by before they are rounded, where the checkpoint says it."""

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.values.shape)

    @property
    def by_blocks(self) -> bool:
        return self.scales.dim() == self.values.dim()

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """Return all tensors, as bytes where communicators have no other name for their dtype."""
        return self.values.view(torch.uint8), self.scales


@dataclass(frozen=True, slots=True, kw_only=True)
class Int8Groups:
    """(value - zero) * scale."""

    values: Tensor
    """(N, K) int8"""
    scales: Tensor
    """(N, K / group), rounded up: floating point."""
    zeros: Tensor | None
    """(N, K / group), rounded up: int16 of -128..128, or float16; None: all are 0."""
    group: int
    """Inputs that share a scale, a multiple of 4."""

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.values.shape)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return self.values.view(torch.uint8), self.scales, *(() if self.zeros is None else (self.zeros,))


@dataclass(frozen=True, slots=True, kw_only=True)
class FourBit:
    """(nibble - zero) * scale; or E2M1 numbers times powers of two (MXFP4), or times E4M3's and one of each output (NVFP4).

    Word j of the 32 of each 128 inputs has in bits [4 i, 4 i + 4) input 32 i + j, so that one shift and one mask of 32 words
    give 32 neighbours, two in each register. Behind the K-th input words have any numbers: nobody may multiply with them."""

    words: Tensor
    """(K / 128, N, 32) int16, K rounded up to a multiple of 128."""
    scales: Tensor
    """(K / group, N, 2), K / group rounded up: floating point, a scale and a zero point; or (K / 128, N, 4) uint8: exponents with
    a bias of 127, or (K / 128, N, 8) uint8: E4M3's bits. Those behind the K-th input are any."""
    group: int
    """Inputs that share a scale: 16, 32, 64, or a multiple of 128; 32 with exponents; 16 with E4M3."""
    inputs: int
    """K"""
    factors: Tensor | None = None
    """(N,) float32: what all scales of an output are multiplied with, for those of E4M3."""
    has_whole_zeros: bool = True
    """Whether zero points are whole numbers of at most 255. Only CPUs have kernels for others."""

    @property
    def shape(self) -> tuple[int, ...]:
        return (*self.words.shape[:-3], self.words.shape[-2], self.inputs)

    @property
    def is_float(self) -> bool:
        """Whether numbers are E2M1."""
        return self.scales.dtype == torch.uint8

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """Return all tensors, words in pairs, which communicators have a name for."""
        return self.words.view(torch.int32), self.scales, *(() if self.factors is None else (self.factors,))


@dataclass(frozen=True, slots=True)
class Unread:
    """A matrix of which nothing is read, since its packed form is there already: it can be joined and reordered."""

    rows: Tensor
    """(N, 0)"""
    inputs: int
    """K"""

    @property
    def shape(self) -> tuple[int, ...]:
        return (*self.rows.shape[:-1], self.inputs)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return ()


Weight = Tensor | EightBit | Int8Groups | FourBit | Unread


LookUp = Callable[[Tensor], Tensor]
"""numbers of rows (T,) int64 -> those rows of a matrix, (T, K)"""


@dataclass(frozen=True, slots=True)
class Prepacked:
    """A matrix in a layout that one implementation of `Ops.linear` knows."""

    shape: tuple[int, int]
    """(N, K)"""
    product: Callable[[Tensor, Tensor | None], Tensor]
    """(x (T, K), T at least 1; bias (N,) or None) -> (T, N)"""
    rows: LookUp | None = None
    """The matrix's own rows; None: they cannot be read back."""


LinearWeight = Weight | Prepacked


@dataclass(frozen=True, slots=True)
class PrepackedExperts:
    """S matrices of that kind, which are alike."""

    data: Tensor
    """(S, bytes) uint8"""
    shape: tuple[int, int, int]
    """(S, N, K)"""
    product: Callable[[Tensor, Tensor, Tensor | None], Tensor]
    """(one's bytes, x (T, K), bias (N,) or None) -> (T, N)"""

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return (self.data,)


ExpertWeight = Weight | PrepackedExperts


def tensors_of(weight: ExpertWeight) -> tuple[Tensor, ...]:
    """Return the tensors that a weight consists of. They may be written to."""
    return (weight,) if isinstance(weight, Tensor) else weight.tensors


def as_float(weight: Weight, dtype: torch.dtype) -> Tensor:
    """Return the weight's numbers: (..., N, K) in `dtype`."""
    match weight:
        case EightBit():
            return _from_eight_bits(weight).to(dtype)
        case Int8Groups():
            return _from_groups(weight).to(dtype)
        case FourBit():
            return _from_four_bits(weight).to(dtype)
        case Unread():
            raise TypeError(f"nothing was read of this matrix {weight.shape}")
        case _:
            return weight.to(dtype)


def _from_eight_bits(weight: EightBit) -> Tensor:
    if not weight.by_blocks:
        return weight.values.float() * weight.scales[..., None]
    rows, columns = weight.shape[-2:]
    scales = weight.scales.repeat_interleave(SCALE_BLOCK, -2).repeat_interleave(SCALE_BLOCK, -1)
    return weight.values.float() * scales[..., :rows, :columns]


def _from_groups(weight: Int8Groups) -> Tensor:
    def spread(each: Tensor) -> Tensor:
        return each.float().repeat_interleave(weight.group, -1)[..., : weight.shape[-1]]

    values = weight.values.float()
    return (values if weight.zeros is None else values - spread(weight.zeros)) * spread(weight.scales)


def nibbles_of(weight: FourBit) -> Tensor:
    """(..., K, N) uint8 of 0..15; an output's lie side by side."""
    pairs = weight.words.view(torch.uint8).unflatten(-1, (PLANE, 2)).transpose(-4, -3)
    planes = torch.empty(*pairs.shape[:-2], 4, PLANE, dtype=torch.uint8, device=pairs.device)
    for byte in range(2):
        planes[..., 2 * byte, :] = pairs[..., byte] & 15
        planes[..., 2 * byte + 1, :] = pairs[..., byte] >> 4
    return planes.flatten(-3)[..., : weight.inputs].mT


def _from_four_bits(weight: FourBit) -> Tensor:
    nibbles = nibbles_of(weight)

    def spread(each: Tensor) -> Tensor:
        return each.float().repeat_interleave(weight.group, -2)[..., : weight.inputs, :]

    if not weight.is_float:
        scales, zeros = weight.scales.unbind(-1)
        return ((nibbles - spread(zeros)) * spread(scales)).mT
    table = torch.tensor([*_E2M1, *(-x for x in _E2M1)], device=nibbles.device)
    each = weight.scales.mT.flatten(-3, -2)
    if weight.factors is None:
        return (table[nibbles.long()] * torch.exp2(spread(each) - 127)).mT
    scales = each.view(torch.float8_e4m3fn).float() * weight.factors[..., None, :]
    return (table[nibbles.long()] * spread(scales)).mT


def joined(parts: Sequence[Weight], dtype: torch.dtype) -> Weight:
    """Return one matrix with all outputs of matrices with the same inputs. It is in `dtype` where they are stored in different
    ways or end inside a block of scales, but for whole numbers in groups: these get the most bits and the smallest groups."""
    parts = _in_like_groups(parts)
    first = parts[0]
    by_blocks = isinstance(first, EightBit) and first.by_blocks
    inside_block = by_blocks and any(part.shape[-2] % SCALE_BLOCK for part in parts[:-1])
    if inside_block or not _alike(parts):
        return torch.cat([as_float(part, dtype) for part in parts], -2)
    return _each(parts, lambda own, outputs: torch.cat(own, outputs))


def _in_like_groups(parts: Sequence[Weight]) -> Sequence[Weight]:
    """Return matrices of whole numbers in the same layout, which loses nothing; others as they are."""
    whole = [
        part
        for part in parts
        if isinstance(part, Int8Groups) or (isinstance(part, FourBit) and not part.is_float)
    ]
    if len(whole) < len(parts) or _alike(parts):
        return parts
    group, dtype = gcd(*(part.group for part in whole)), whole[0].scales.dtype
    for part in whole[1:]:
        dtype = torch.promote_types(dtype, part.scales.dtype)
    four_bit = [part for part in whole if isinstance(part, FourBit)]
    if len(four_bit) == len(parts):
        return [_in_smaller_groups(part, group, dtype) for part in four_bit]
    eight_bit = [_in_int8_groups(part, group, dtype) for part in whole]
    if all(part.zeros is None for part in eight_bit):
        return eight_bit
    empty = [torch.zeros_like(part.scales, dtype=torch.float16) for part in eight_bit]
    return [
        replace(part, zeros=zeros if part.zeros is None else part.zeros.half())
        for part, zeros in zip(eight_bit, empty, strict=True)
    ]


def _in_smaller_groups(weight: FourBit, group: int, dtype: torch.dtype) -> FourBit:
    scales = weight.scales.to(dtype).repeat_interleave(weight.group // group, -3)
    return replace(weight, scales=scales[..., : -(-weight.inputs // group), :, :], group=group)


def _in_int8_groups(weight: Int8Groups | FourBit, group: int, dtype: torch.dtype) -> Int8Groups:
    """Return the same weights."""
    if isinstance(weight, FourBit):
        scales, zeros = (each.mT for each in weight.scales.unbind(-1))
        values = nibbles_of(weight).mT.to(torch.int8)
        if (zeros == SYMMETRIC).all():
            values, zeros = values - SYMMETRIC, None
    else:
        values, scales, zeros = weight.values, weight.scales, weight.zeros

    def spread(each: Tensor) -> Tensor:
        return each.repeat_interleave(weight.group // group, -1)[..., : -(-weight.shape[-1] // group)]

    return Int8Groups(
        values=values,
        scales=spread(scales.to(dtype)),
        zeros=None if zeros is None else spread(zeros),
        group=group,
    )


def reordered(weight: Weight, outputs: Tensor, dtype: torch.dtype) -> Weight:
    """Return the weight with its outputs in another order, (N,) int64. It is in `dtype` where blocks of outputs share a scale."""
    if isinstance(weight, EightBit):
        if weight.by_blocks:
            return as_float(weight, dtype)[outputs]
        return replace(weight, values=weight.values[outputs], scales=weight.scales[outputs])
    return _each([weight], lambda own, dim: own[0].index_select(dim, outputs.to(own[0].device)))


def stacked(parts: Sequence[Weight], dtype: torch.dtype) -> Weight:
    """Return one weight of one matrix for each expert. It is in `dtype` where they are floats, or stored in different ways.
    Experts round no inputs."""
    if isinstance(parts[0], Tensor) or not _alike(parts):
        return torch.stack([as_float(part, dtype) for part in parts])
    free = [replace(part, input_scale=None) if isinstance(part, EightBit) else part for part in parts]
    return _each(free, lambda own, _: torch.stack(own))


def one_of(weight: Weight, index: int) -> Weight:
    """Return one expert's matrix."""
    return weight[index] if isinstance(weight, Tensor) else _each([weight], lambda own, _: own[0][index])


def on_device(weight: Weight, device: torch.device) -> Weight:
    """Return the weight in memory of its own, aligned as kernels need it: in a file it may begin anywhere."""
    return _each([weight], lambda own, _: own[0].to(device, copy=True))


def _alike(parts: Sequence[Weight]) -> bool:
    """Return whether all of them are stored in the same way."""
    return all(_fits(parts[0], part) for part in parts[1:])


def _fits(first: Weight, other: Weight) -> bool:
    match first, other:
        case Tensor(), Tensor():
            return first.dtype == other.dtype
        case EightBit(), EightBit():
            return first.values.dtype == other.values.dtype and first.by_blocks == other.by_blocks
        case Int8Groups(), Int8Groups():
            alike = first.group == other.group and (first.zeros is None) == (other.zeros is None)
            return alike and first.scales.dtype == other.scales.dtype
        case FourBit(), FourBit():
            alike = first.group == other.group and (first.factors is None) == (other.factors is None)
            return alike and first.scales.dtype == other.scales.dtype
        case Unread(), Unread():
            return True
        case _:
            return False


def _each(parts: Sequence[Weight], combine: Callable[[list[Tensor], int], Tensor]) -> Weight:
    """Return a weight whose every tensor is `combine`d of those of `parts`, which are alike. It is called with the tensors and
    the dimension of their outputs."""
    first = parts[0]
    match first:
        case EightBit():
            own = [part for part in parts if isinstance(part, EightBit)]
            outputs = -2 if first.by_blocks else -1
            values, scales = combine([p.values for p in own], -2), combine([p.scales for p in own], outputs)
            given = [p.input_scale for p in own if p.input_scale is not None]
            # Matrices of one input are given one scale for it; of two, the larger one cuts nothing off.
            shared = combine(given, 0).amax(0, keepdim=True) if len(given) == len(own) else None
            return EightBit(values, scales, shared)
        case Int8Groups():
            own = [part for part in parts if isinstance(part, Int8Groups)]
            zeros = [p.zeros for p in own if p.zeros is not None]
            return Int8Groups(
                values=combine([p.values for p in own], -2),
                scales=combine([p.scales for p in own], -2),
                zeros=combine(zeros, -2) if zeros else None,
                group=first.group,
            )
        case FourBit():
            own = [part for part in parts if isinstance(part, FourBit)]
            factors = [p.factors for p in own if p.factors is not None]
            return FourBit(
                words=combine([p.words for p in own], -2),
                scales=combine([p.scales for p in own], -2),
                group=first.group,
                inputs=first.inputs,
                factors=combine(factors, -1) if factors else None,
                has_whole_zeros=all(p.has_whole_zeros for p in own),
            )
        case Unread():
            own = [part for part in parts if isinstance(part, Unread)]
            return Unread(combine([p.rows for p in own], -2), first.inputs)
        case _:
            return combine([part for part in parts if isinstance(part, Tensor)], -2)
