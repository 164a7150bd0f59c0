"""The norms of rows of the residual."""

import torch
from torch import Tensor

from kernels.ops import Ops
from kernels.rounding import Activations, Rounding
from models.formats.weight_source import WeightSource
from models.spec.model_spec import ModelSpec


def add_and_norm(
    ops: Ops, x: Tensor, added: Tensor | None, weight: Tensor | None, eps: float, takes: Rounding | None
) -> tuple[Tensor, Activations]:
    """Return the sum, and its norm in the form that the next block takes, or the sum twice where there is no norm."""
    if weight is None:
        total = x if added is None else x + added
        return total, total
    if takes is not None:
        return (
            ops.norm_rounded(x, None, weight, eps, takes)
            if added is None
            else ops.norm_rounded(added, x, weight, eps, takes)
        )
    if added is None:
        return x, ops.rms_norm(x, weight, eps)
    return ops.add_rms_norm(added, x, weight, eps)


def read_norm(spec: ModelSpec, checkpoint: WeightSource, name: str) -> Tensor:
    """Return (hidden_size,) float32, by which a normalised vector is multiplied."""
    weight = checkpoint.take(name, (spec.hidden_size,), torch.float32)
    return weight + 1.0 if spec.unit_offset_norm else weight
