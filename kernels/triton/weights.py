"""`Ops.linear` and `Ops.experts` over weights as they are stored: which kernel multiplies which."""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from kernels.ops import ExpertWeights, FeedForward, GatedBlock
from kernels.packed import (
    FLOAT8_CAPABILITY,
    EightBit,
    FourBit,
    Int8Groups,
    Kind,
    LinearWeight,
    Prepacked,
    PrepackedExperts,
    Weight,
)
from kernels.rounding import Activations, rounding_of
from kernels.triton.gemm_few import linear_few, takes
from kernels.triton.gemm_four_bit import MOST_ROWS, linear_four_bit, most_rows
from kernels.triton.gemm_scaled import linear_scaled
from kernels.triton.grouped import Groups, combine, group_rows, grouped_linear
from kernels.triton.grouped_packed import grouped_linear_packed
from kernels.triton.platform import capability
from kernels.triton.quantise import round_to


def kept(device: torch.device) -> frozenset[Kind]:
    """`Ops.keeps`."""
    every: frozenset[Kind] = frozenset(("float8", "int8", "four_bit", "mxfp4", "nvfp4"))
    return every if capability(device) >= FLOAT8_CAPABILITY else every - {"float8"}


def linear(x: Activations, weight: LinearWeight, bias: Tensor | None) -> Tensor:
    """`Ops.linear`. Plain products are cuBLAS', but for those of few rows."""
    assert not isinstance(weight, Prepacked), "nothing is packed here"
    if (how := rounding_of(weight)) is not None:
        x = round_to(x, how) if isinstance(x, Tensor) else x
        assert isinstance(weight, EightBit)
        return linear_scaled(x.values, weight.values, x.scales, weight.scales, x.dtype, bias)
    assert isinstance(x, Tensor), "rounded for another weight"
    assert not isinstance(weight, Int8Groups), "CPUs alone keep them"
    match weight:
        case FourBit():
            return linear_four_bit(x, weight, bias)
        case _:
            return linear_few(x, weight, bias) if takes(x, weight) else F.linear(x, weight, bias)


def feed_forward(block: GatedBlock, in_order: FeedForward) -> FeedForward:
    """`Ops.feed_forward`: of few rows the gate is computed by the program that has its inputs."""
    gate_up, gate = block.gate_up, block.gate
    if not isinstance(gate_up, Tensor) or gate is None:
        return in_order

    def computed(x: Activations) -> Tensor:
        if isinstance(x, Tensor) and takes(x, gate_up):
            return linear(linear_few(x, gate_up, block.gate_up_bias, gate), block.down, None)
        return in_order(x)

    return computed


def experts(
    x: Tensor, slots: Tensor, weights: Tensor, held: ExpertWeights, activate: Callable[[Tensor], Tensor],
    block_m: int = 0,
) -> Tensor:  # fmt: skip
    """`Ops.experts`; `block_m`: see `group_rows`."""
    gate_up, down = held.gate_up, held.down
    assert not isinstance(gate_up, PrepackedExperts)
    assert not isinstance(down, PrepackedExperts)
    width = slots.shape[1]
    flat = slots.flatten()
    most = min(_most_rows(weight) for weight in (gate_up, down))
    groups = group_rows(flat, down.shape[0], block_m, most)
    inner = torch.empty((flat.numel(), gate_up.shape[1]), dtype=x.dtype, device=x.device)
    _multiply(x, gate_up, held.gate_up_bias, groups, inner, width=width)
    pairs = torch.empty((flat.numel(), down.shape[1]), dtype=x.dtype, device=x.device)
    _multiply(activate(inner), down, None, groups, pairs, scatter=True)
    return combine(pairs, slots.contiguous(), weights.contiguous())


def _most_rows(weight: Weight) -> int:
    match weight:
        case EightBit():
            return MOST_ROWS
        case FourBit():
            return most_rows(weight, weight.words.device)
        case _:
            return 128


def _multiply(
    x: Tensor, weight: Weight, bias: Tensor | None, groups: Groups, out: Tensor, *, width: int = 0, scatter: bool = False
) -> None:  # fmt: skip
    assert not isinstance(weight, Int8Groups), "CPUs alone keep them"
    if isinstance(weight, Tensor):
        grouped_linear(x, weight, bias, groups, out, width=width, scatter=scatter)
    else:
        grouped_linear_packed(x, weight, bias, groups, out, width=width, scatter=scatter)
