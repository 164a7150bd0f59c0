"""Reads a layer's experts in any of the ways in which checkpoints spell them, as far as this rank holds them."""

import torch

from kernels.ops import ExpertWeights
from models.quantised import MXFP4_GROUP, from_mxfp4
from models.spec import MoeSpec
from models.weights import Checkpoint


def read_experts(checkpoint: Checkpoint, prefix: str, moe: MoeSpec, hidden: int) -> ExpertWeights:
    """`prefix` ends in `experts`. Raises UnsupportedModel."""
    if moe.by_turns:
        return _by_turns(checkpoint, prefix, moe, hidden)
    if f"{prefix}.gate_up_proj" in checkpoint:
        return _stacked(checkpoint, prefix, moe, hidden)
    return _separate(checkpoint, prefix, moe, hidden)


def _stacked(checkpoint: Checkpoint, prefix: str, moe: MoeSpec, hidden: int) -> ExpertWeights:
    """All experts in one tensor, as transformers 5 keeps them in memory."""
    inner = moe.intermediate_size
    return ExpertWeights(
        checkpoint.take(f"{prefix}.gate_up_proj", (moe.num_experts, 2 * inner, hidden)),
        checkpoint.take(f"{prefix}.down_proj", (moe.num_experts, hidden, inner)),
    )


def _separate(checkpoint: Checkpoint, prefix: str, moe: MoeSpec, hidden: int) -> ExpertWeights:
    """Three matrices for each expert. Which are held is asked for under the name `prefix`."""
    inner = moe.intermediate_size
    gate, up, down = moe.projections
    held = checkpoint.held(prefix, moe.num_experts)

    def rows(expert: int) -> torch.Tensor:
        parts = [checkpoint.take(f"{prefix}.{expert}.{name}.weight", (inner, hidden)) for name in (gate, up)]
        return torch.cat(parts)

    gate_up = torch.stack([rows(expert) for expert in held])
    downs = [checkpoint.take(f"{prefix}.{expert}.{down}.weight", (hidden, inner)) for expert in held]
    others = set(range(moe.num_experts)).difference(held)
    checkpoint.ignore(*(f"{prefix}.{i}.{name}.weight" for i in others for name in moe.projections))
    return ExpertWeights(gate_up, torch.stack(downs))


def _by_turns(checkpoint: Checkpoint, prefix: str, moe: MoeSpec, hidden: int) -> ExpertWeights:
    """gpt-oss. down_proj's biases are not an expert's own matter: see `Moe`."""
    num, inner = moe.num_experts, moe.intermediate_size
    if moe.mxfp4:
        gate_up = _from_mxfp4(checkpoint, f"{prefix}.gate_up_proj", (num, 2 * inner, hidden))
        down = _from_mxfp4(checkpoint, f"{prefix}.down_proj", (num, hidden, inner))
    else:
        gate_up = checkpoint.take(f"{prefix}.gate_up_proj", (num, hidden, 2 * inner)).mT
        down = checkpoint.take(f"{prefix}.down_proj", (num, inner, hidden)).mT.contiguous()
    bias = checkpoint.take(f"{prefix}.gate_up_proj_bias", (num, 2 * inner))
    return ExpertWeights(
        torch.cat((gate_up[:, ::2], gate_up[:, 1::2]), 1), down, torch.cat((bias[:, ::2], bias[:, 1::2]), 1)
    )


def _from_mxfp4(checkpoint: Checkpoint, name: str, shape: tuple[int, int, int]) -> torch.Tensor:
    *rows, inputs = shape
    groups = inputs // MXFP4_GROUP
    blocks = checkpoint.take(f"{name}_blocks", (*rows, groups, MXFP4_GROUP // 2), torch.uint8)
    scales = checkpoint.take(f"{name}_scales", (*rows, groups), torch.uint8)
    return from_mxfp4(blocks, scales, checkpoint.dtype)
