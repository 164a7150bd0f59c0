"""Which of a checkpoint's tensors are matrices that a model multiplies with, found by making the model without any weights."""

from dataclasses import replace

import torch
from torch import Tensor

from core.errors import UnsupportedModel
from kernels.ops import Ops
from kernels.packed import Kind, LinearWeight, LookUp, Unread, Weight
from kernels.torch.reference import reference_ops
from models.formats.rounded_matrix import WeightRounding
from models.formats.tensor_files import TensorFiles
from models.lora.low_rank import no_adapters
from models.model import Model
from models.spec.model_spec import ModelSpec

_META = torch.device("meta")
_ENDS = ("model.embed_tokens.weight", "lm_head.weight")


def multiplied_matrices(spec: ModelSpec, files: TensorFiles) -> dict[str, tuple[int, int]]:
    """Return the layers' matrices and their shapes, by the names that a decoder's checkpoint has. Raises UnsupportedModel where
    experts share a tensor."""
    noted = _NotedNames(files)
    Model(spec, _without_values(), noted, _META)
    return {name: shape for name, shape in noted.matrices.items() if name not in _ENDS}


class _NotedNames:
    """A `models.formats.weight_source.WeightSource` that reads nothing, and notes what it is asked for."""

    dtype, device = torch.float32, _META
    keeps: frozenset[Kind] = frozenset()
    rounds: WeightRounding | None = None
    bytes_read = 0

    def __init__(self, files: TensorFiles) -> None:
        self._files, self.adapters = files, no_adapters()
        self.matrices: dict[str, tuple[int, int]] = {}

    def __contains__(self, name: str) -> bool:
        return name in self._files

    def take(self, name: str, shape: tuple[int, ...], dtype: torch.dtype | None = None) -> Tensor:
        del name
        return torch.empty(shape, dtype=dtype or self.dtype, device=_META)

    def matrix(self, name: str, shape: tuple[int, int]) -> Weight:
        self.matrices[name] = shape
        return self.table(name, shape)

    def table(self, name: str, shape: tuple[int, int]) -> Weight:
        del name
        return Unread(torch.empty(shape[0], 0), shape[1])

    def each_expert(
        self, name: str, shape: tuple[int, int, int], *, transposed: bool = False
    ) -> list[Weight] | None:
        del transposed
        raise UnsupportedModel(
            f"tensor {name!r} has the matrices of all {shape[0]} experts, for which compressed-tensors has no names: set "
            "model.quantization instead, which rounds them as they are read"
        )

    def held(self, name: str, count: int) -> list[int]:
        del name
        return list(range(count))

    def ignore(self, *names: str) -> None:
        """Nothing has to be used."""

    ignore_under = ignore


def _without_values() -> Ops:
    def pack(weight: Weight, dtype: torch.dtype) -> LinearWeight:
        del dtype
        return weight

    def look_up(weight: Weight, dtype: torch.dtype, head: LinearWeight | None) -> LookUp:
        del weight, head
        return lambda numbers: torch.empty(len(numbers), 0, dtype=dtype)

    return replace(reference_ops(), pack=pack, look_up=look_up)
