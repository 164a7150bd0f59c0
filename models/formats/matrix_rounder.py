"""Rounds a checkpoint's matrices of floats as they are read, to what a rank then holds of them.

A scale is made from whole rows, and NVFP4's overall one from all matrices that engines multiply at once. So the numbers do not
depend on how a model is cut."""

import re
from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor

from kernels.packed import Kind, Weight, on_device
from models.files.cuts import part_at
from models.formats.rounded_matrix import (
    FLOATS,
    Parts,
    WeightRounding,
    largest_of,
    round_matrix,
    round_part,
)
from models.formats.stored_matrix import Cut, StoredTensors

_TOGETHER: Final = (
    ("q_proj", "k_proj", "v_proj"),
    ("gate_proj", "up_proj"),
    ("w1", "w3"),
    ("q_a_proj", "kv_a_proj_with_mqa"),
    ("in_proj_qkv", "in_proj_z"),
    ("in_proj_b", "in_proj_a"),
)
"""Modules of one parent with the same input: engines join them, and NVFP4 has one overall scale for what is joined."""
_MODULE: Final = re.compile(r"([^.]+)\.weight$")


def joined_names(name: str) -> list[str]:
    """Return the names of all matrices that are joined with `name`, and its own."""
    found = _MODULE.search(name)
    own = found.group(1) if found else ""
    together = next((names for names in _TOGETHER if own in names), (own,))
    return [_MODULE.sub(f"{other}.weight", name) for other in together]


class MatrixRounder:
    def __init__(
        self, tensors: StoredTensors, dtype: torch.dtype, device: torch.device, keeps: frozenset[Kind]
    ) -> None:
        """Round on `device`. What `keeps` lacks becomes `dtype` again."""
        self._tensors, self._dtype, self._device, self._keeps = tensors, dtype, device, keeps
        self._largest: dict[str, Tensor] = {}
        """By the first name of what shares it."""

    def part(self, to: WeightRounding, name: str, shape: Sequence[int], cut: Cut) -> Weight | None:
        """Return a rank's part of a matrix. None where it is not of floats, or of a size that the format lacks. Raises
        UnsupportedModel."""
        if self._tensors.dtype_of(name) not in FLOATS or not to.takes(shape):
            return None
        rows = self._tensors.read(name, [cut[0], [slice(0, shape[1])]])
        return self._rounded(to, name, rows, cut[1], self._shared(name) if to.to == "nvfp4" else None)

    def parts(self, to: WeightRounding, name: str) -> Parts:
        """Return the tensors of a whole matrix. Raises UnsupportedModel where a number is not finite."""
        largest = self._shared(name) if to.to == "nvfp4" else None
        return round_matrix(name, self._tensors.read(name), to, largest)

    def experts(
        self, to: WeightRounding, name: str, shape: Sequence[int], cut: Cut, *, transposed: bool
    ) -> list[Weight] | None:
        """Return a rank's parts of the experts that it holds of a tensor (experts, outputs, inputs), or with inputs before
        outputs where they are `transposed`. None as in `part`."""
        size = shape[:0:-1] if transposed else shape[1:]
        if self._tensors.dtype_of(name) not in FLOATS or not to.takes(size):
            return None
        rows, columns = (cut[2], cut[1]) if transposed else (cut[1], cut[2])
        found: list[Weight] = []
        for index in (index for run in cut[0] for index in range(run.start, run.stop)):
            whole = [[slice(index, index + 1)], *([slice(0, each)] for each in shape[1:])]
            matrix = self._tensors.read(name, whole)[0]
            matrix = matrix.T if transposed else matrix
            own = part_at(matrix, [rows, [slice(0, size[1])]]).contiguous()
            found.append(self._rounded(to, f"{name}[{index}]", own, columns, largest_of(matrix)))
        return found

    def _rounded(
        self, to: WeightRounding, name: str, rows: Tensor, columns: Sequence[slice], largest: Tensor | None
    ) -> Weight:
        here = None if largest is None else largest.to(self._device)
        made = round_part(to, name, rows.to(self._device), columns, self._keeps, largest=here)
        return (
            made.to(self._device, self._dtype) if isinstance(made, Tensor) else on_device(made, self._device)
        )

    def _shared(self, name: str) -> Tensor:
        """Return the largest magnitude of all that share an overall scale with `name`."""
        names = [each for each in joined_names(name) if self._tensors.dtype_of(each) in FLOATS]
        if names[0] not in self._largest:
            found = [largest_of(self._tensors.read(each)) for each in names]
            self._largest[names[0]] = torch.stack(found).amax()
        return self._largest[names[0]]
