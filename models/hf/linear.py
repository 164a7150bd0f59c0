"""Linear layers of transformers' modules, multiplied as those of Baton's own models are."""

from collections.abc import Collection
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from kernels.ops import Ops
from kernels.packed import LinearWeight


def pack_products(
    model: nn.Module, ops: Ops, dtype: torch.dtype, only_read: Collection[nn.Module] = ()
) -> None:
    """Replace the products of plain linear layers, but of those whose numbers are `only_read`. Of their matrices only the shapes
    stay: a layer whose numbers are read as well shows when the model is compared."""
    for module in model.modules():
        if type(module) is not nn.Linear or module in only_read:
            continue
        matrix = module.weight.detach()
        module.forward = _Product(ops, ops.pack(matrix, dtype), module.bias)
        module.weight = nn.Parameter(
            matrix.new_full((1, 1), torch.nan).expand(matrix.shape), requires_grad=False
        )


@dataclass(frozen=True, slots=True)
class _Product:
    """A linear layer's."""

    ops: Ops
    weight: LinearWeight
    bias: Tensor | None

    def __call__(self, input: Tensor) -> Tensor:
        """(..., N) -> (..., M)."""
        return self.ops.linear(input.flatten(0, -2), self.weight, self.bias).unflatten(0, input.shape[:-1])
