"""Brings weights of 8 and 4 bits into panels as a checkpoint stores them: its numbers, scales and zero points are copied."""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from kernels.cpu.linear import MOST_INPUTS_OF_BYTES, Panels, packed_int4, packed_int8
from kernels.packed import (
    SCALE_BLOCK,
    SYMMETRIC,
    EightBit,
    ExpertWeight,
    FourBit,
    Int8Groups,
    Kind,
    PrepackedExperts,
    Weight,
    nibbles_of,
    one_of,
)

KEPT: frozenset[Kind] = frozenset(("int8", "int8_groups", "four_bit", "half"))
"""`Ops.keeps` where there are native kernels."""


def stored_panels(weight: Weight, *, drops_zeros: bool = True) -> Panels | None:
    """Return None for floats, and for what no panel can have. `drops_zeros`: whether zero points that are all alike may be left
    out."""
    if isinstance(weight, Tensor) or weight.shape[-1] > MOST_INPUTS_OF_BYTES:
        return None
    match weight:
        case Int8Groups():
            drops = weight.zeros is None or (drops_zeros and not weight.zeros.any())
            zeros = None if drops else weight.zeros
            return packed_int8(weight.values, weight.scales, zeros, weight.group)
        case EightBit() if weight.values.dtype == torch.int8:
            if not weight.by_blocks:
                return packed_int8(weight.values, weight.scales[:, None])
            scales = weight.scales.repeat_interleave(SCALE_BLOCK, 0)[: weight.shape[0]]
            return packed_int8(weight.values, scales, None, SCALE_BLOCK)
        case FourBit() if not weight.is_float:
            scales, zeros = (each.mT for each in weight.scales.unbind(-1))
            drops = drops_zeros and bool((zeros == SYMMETRIC).all())
            kept = None if drops else zeros.to(torch.uint8 if weight.has_whole_zeros else torch.float16)
            return packed_int4(nibbles_of(weight).mT, scales, kept, weight.group)
        case _:
            return None


def stored_experts(weight: ExpertWeight) -> ExpertWeight:
    """(S, N, K) -> the same in panels, where they are possible. Panels of a kind have one size, since experts may move to another
    rank."""
    if isinstance(weight, Tensor | PrepackedExperts):
        return weight
    made: list[Panels] = []
    for index in range(weight.shape[0]):
        panels = stored_panels(one_of(weight, index), drops_zeros=False)
        if panels is None:
            return weight
        made.append(panels)
    return _together(made) if made else weight


def _together(made: Sequence[Panels]) -> PrepackedExperts:
    first = replace(made[0], data=torch.empty(0, dtype=torch.uint8))

    def product(data: Tensor, x: Tensor, bias: Tensor | None) -> Tensor:
        return replace(first, data=data).product(x, bias)

    return PrepackedExperts(torch.stack([each.data for each in made]), (len(made), *first.shape), product)
