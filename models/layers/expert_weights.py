"""Reads a layer's experts in any of the forms that checkpoints have, as far as this rank holds them."""

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from kernels.ops import ExpertWeights
from kernels.packed import Weight, joined, reordered, stacked
from kernels.packing import from_mxfp4 as packed_mxfp4
from models.formats.quantised import MXFP4_GROUP, from_mxfp4, in_bytes
from models.formats.weight_source import WeightSource
from models.spec.model_spec import MoeSpec

_STACKED = (
    ("experts.gate_up_proj", "experts.down_proj"),
    ("input_linear.weight", "output_linear.weight"),
)
"""Names of gates and ups, and of downs, where all experts are in one tensor: as transformers 5 keeps them in memory, and as
Granite's checkpoints do."""


def read_experts(checkpoint: WeightSource, prefix: str, moe: MoeSpec, hidden: int) -> ExpertWeights:
    """`prefix` ends in `experts`. Raises UnsupportedModel."""
    if moe.by_turns:
        return _by_turns(checkpoint, prefix, moe, hidden)
    block = prefix.removesuffix("experts")
    if moe.transposed and f"{prefix}.gate_up_proj" in checkpoint:
        return _transposed(checkpoint, prefix, moe, hidden)
    for gate_up, down in _STACKED:
        if f"{block}{gate_up}" in checkpoint:
            return _stacked(checkpoint, f"{block}{gate_up}", f"{block}{down}", moe, hidden)
    return _separate(checkpoint, prefix, moe, hidden)


def _stacked(checkpoint: WeightSource, gate_up: str, down: str, moe: MoeSpec, hidden: int) -> ExpertWeights:
    """Read experts that are in two tensors of these names."""
    num, inner = moe.num_experts, moe.intermediate_size
    return ExpertWeights(
        _of_all(checkpoint, gate_up, (num, 2 * inner, hidden)),
        _of_all(checkpoint, down, (num, hidden, inner)),
    )


def _transposed(checkpoint: WeightSource, prefix: str, moe: MoeSpec, hidden: int) -> ExpertWeights:
    """Read experts as Llama 4's and Qwen3-VL's checkpoints have them."""
    num, inner = moe.num_experts, moe.intermediate_size
    gate_up = _of_all(checkpoint, f"{prefix}.gate_up_proj", (num, hidden, 2 * inner), transposed=True)
    down = _of_all(checkpoint, f"{prefix}.down_proj", (num, inner, hidden), transposed=True)
    return ExpertWeights(gate_up, down)


def _of_all(
    checkpoint: WeightSource, name: str, shape: tuple[int, int, int], *, transposed: bool = False, gates_first: bool = False
) -> Weight:  # fmt: skip
    """Read one tensor of all experts' matrices, in which gates and ups alternate where they are to be put `gates_first`."""
    each = checkpoint.each_expert(name, shape, transposed=transposed)
    if each is None:
        held = checkpoint.take(name, shape)
        held = held.mT if transposed else held
        return _gates_first(held) if gates_first else held.contiguous()
    if gates_first:
        order = torch.arange(each[0].shape[0]).unflatten(0, (-1, 2)).T.flatten() if each else None
        each = [matrix if order is None else reordered(matrix, order, checkpoint.dtype) for matrix in each]
    return stacked(each, checkpoint.dtype)


def _separate(checkpoint: WeightSource, prefix: str, moe: MoeSpec, hidden: int) -> ExpertWeights:
    """Read each expert's matrices. The `Shard` is asked under the name `prefix` which are held."""
    inner = moe.intermediate_size
    *ups, down = moe.projections
    held = checkpoint.held(prefix, moe.num_experts)

    def rows(expert: int) -> Weight:
        parts = [checkpoint.matrix(f"{prefix}.{expert}.{name}.weight", (inner, hidden)) for name in ups]
        return joined(parts, checkpoint.dtype)

    gate_up = stacked([rows(expert) for expert in held], checkpoint.dtype)
    downs = [checkpoint.matrix(f"{prefix}.{expert}.{down}.weight", (hidden, inner)) for expert in held]
    others = set(range(moe.num_experts)).difference(held)
    checkpoint.ignore(*(f"{prefix}.{i}.{name}.weight" for i in others for name in moe.projections))
    return ExpertWeights(gate_up, stacked(downs, checkpoint.dtype))


def _by_turns(checkpoint: WeightSource, prefix: str, moe: MoeSpec, hidden: int) -> ExpertWeights:
    """Read gpt-oss's experts. down_proj's biases are not part of an expert: see `Moe`."""
    num, inner = moe.num_experts, moe.intermediate_size
    if f"{prefix}.gate_proj_bias" in checkpoint:  # a GGUF file's
        biases = [checkpoint.take(f"{prefix}.{name}_proj_bias", (num, inner)) for name in ("gate", "up")]
        return replace(_separate(checkpoint, prefix, moe, hidden), gate_up_bias=torch.cat(biases, 1))
    gate_up: Weight
    down: Weight
    if moe.mxfp4:
        gate_up = _mxfp4(checkpoint, f"{prefix}.gate_up_proj", (num, 2 * inner, hidden), _gates_first)
        down = _mxfp4(checkpoint, f"{prefix}.down_proj", (num, hidden, inner), lambda rows: rows)
    else:
        up_shape, down_shape = (num, hidden, 2 * inner), (num, inner, hidden)
        gate_up = _of_all(checkpoint, f"{prefix}.gate_up_proj", up_shape, transposed=True, gates_first=True)
        down = _of_all(checkpoint, f"{prefix}.down_proj", down_shape, transposed=True)
    bias = checkpoint.take(f"{prefix}.gate_up_proj_bias", (num, 2 * inner))
    return ExpertWeights(gate_up, down, _gates_first(bias))


def _gates_first(rows: Tensor) -> Tensor:
    """Put each expert's gates first, where gates and ups alternate."""
    return torch.cat((rows[:, ::2], rows[:, 1::2]), 1)


def _mxfp4(
    checkpoint: WeightSource, name: str, shape: tuple[int, int, int], ordered: Callable[[Tensor], Tensor]
) -> Weight:
    *rows, inputs = shape
    groups = inputs // MXFP4_GROUP
    blocks = ordered(checkpoint.take(f"{name}_blocks", (*rows, groups, MXFP4_GROUP // 2), torch.uint8))
    scales = ordered(checkpoint.take(f"{name}_scales", (*rows, groups), torch.uint8))
    if "mxfp4" in checkpoint.keeps:
        return packed_mxfp4(blocks.flatten(-2), scales)
    if "int8_groups" in checkpoint.keeps:
        return in_bytes(blocks.flatten(-2), scales.view(torch.float8_e8m0fnu).float(), MXFP4_GROUP)
    return from_mxfp4(blocks, scales, checkpoint.dtype)
