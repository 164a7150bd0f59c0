"""Where a model's layers read their tensors: a checkpoint's files, or weights made up for measurements."""

from typing import Protocol

import torch
from torch import Tensor

from kernels.packed import Kind, Weight
from models.formats.rounded_matrix import WeightRounding
from models.lora.low_rank import AdapterWeights


class MatrixSource(Protocol):
    """Matrices that layers multiply with, in the bits in which they are multiplied."""

    keeps: frozenset[Kind]
    """What `matrix` leaves as it is stored."""
    rounds: WeightRounding | None
    """What matrices of floats are rounded to as they are read."""

    def matrix(self, name: str, shape: tuple[int, int]) -> Weight:
        """As `WeightSource.take`, but as it is stored, where that is among `keeps`, or rounded."""
        ...

    def table(self, name: str, shape: tuple[int, int]) -> Weight:
        """As `matrix`, of an embedding, which has eight bits where matrices are rounded to four."""
        ...

    def each_expert(
        self, name: str, shape: tuple[int, int, int], *, transposed: bool = False
    ) -> list[Weight] | None:
        """Return what this rank holds of a tensor of all experts' matrices, (experts, outputs, inputs) or `transposed` ones,
        rounded. None where they are not."""
        ...


class WeightSource(MatrixSource, Protocol):
    """Gives each tensor by its name in the checkpoint, and of each only what this rank holds. `shape` is the whole tensor's."""

    dtype: torch.dtype
    """What the model computes in."""
    device: torch.device
    """Where tensors are put."""
    adapters: AdapterWeights
    """What lies beside the matrices."""

    @property
    def bytes_read(self) -> int: ...

    def __contains__(self, name: str) -> bool: ...

    def take(self, name: str, shape: tuple[int, ...], dtype: torch.dtype | None = None) -> Tensor:
        """In `dtype` or the model's. Raises UnsupportedModel where there is no such tensor."""
        ...

    def held(self, name: str, count: int) -> list[int]:
        """Which of `count` things that have tensors of their own this rank holds."""
        ...

    def ignore(self, *names: str) -> None:
        """These tensors are not this model's, or not this rank's."""
        ...

    def ignore_under(self, *prefixes: str) -> None:
        """All tensors whose names begin so are not this rank's."""
        ...
