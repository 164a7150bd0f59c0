"""Rows of embeddings."""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from kernels.packed import EightBit


@dataclass(frozen=True, slots=True)
class TableRows:
    """A `LookUp` of a matrix as it is."""

    table: Tensor
    """(N, K)"""

    def __call__(self, numbers: Tensor) -> Tensor:
        return F.embedding(numbers, self.table)


@dataclass(frozen=True, slots=True)
class ScaledRows:
    """A `LookUp` of a matrix of eight bits with a scale for each row."""

    matrix: EightBit
    dtype: torch.dtype

    def __call__(self, numbers: Tensor) -> Tensor:
        values = self.matrix.values
        rows = values.view(torch.uint8).index_select(0, numbers).view(values.dtype)
        return (rows.float() * self.matrix.scales[numbers, None]).to(self.dtype)
