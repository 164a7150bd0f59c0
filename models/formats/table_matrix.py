"""Matrices of bitsandbytes: NF4 and FP4, whose numbers stand in a table, and LLM.int8.

Each run of 64 numbers of the matrix, row after row, has a scale, `absmax`. Where these are quantised too, 256 of them share one,
and their mean is added. bitsandbytes makes them the dtype that the matrix had, and so does a CPU that keeps 16 bits."""

import json
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from core.errors import UnsupportedModel
from kernels.packed import Int8Groups, Kind, Weight
from models.files.cuts import indices
from models.formats.packed import at_runs
from models.formats.stored_matrix import Cut, StoredTensors, fitting, require_shape
from models.spec.quantisation import Quantisation

_STATE = ".quant_state.bitsandbytes__"
_TYPES = ("nf4", "fp4")
_NESTED = (".nested_absmax", ".nested_quant_map")
SUFFIXES = (".absmax", ".quant_map", *_NESTED, *(_STATE + kind for kind in _TYPES))
"""What follows the matrix's name in the names of its tensors."""
INT8_SUFFIXES = ("SCB", "weight_format")
"""The same, in place of `weight`."""
_LARGEST = 127
_WORD = 4
"""Numbers of a multiple of which `Int8Groups` has scales."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TableMatrix:
    """See `models.formats.stored_matrix.StoredMatrix`."""

    tensors: StoredTensors
    name: str
    said: dict[str, Any]
    """Its sizes, and those of what its scales are made of."""
    shape: tuple[int, ...]

    fits = True

    def floats(self, cut: Cut) -> Tensor:
        rows, columns = indices(cut)
        return self._whole()[rows][:, columns]

    def kept(self, cut: Cut, keeps: frozenset[Kind]) -> Weight | None:
        if "half" not in keeps:
            return None
        dtype = {"bfloat16": torch.bfloat16, "float16": torch.float16}.get(self.said["dtype"])
        return None if dtype is None else self.floats(cut).to(dtype)

    def _whole(self) -> Tensor:
        pairs = self.tensors.read(self.name).contiguous().view(torch.uint8).flatten()
        codes = torch.stack((pairs >> 4, pairs & 15), -1).flatten()[: self.shape[0] * self.shape[1]]
        scales = self._scales().repeat_interleave(self.said["blocksize"])[: len(codes)]
        return (self._read(".quant_map").float()[codes.int()] * scales).view(self.shape)

    def _scales(self) -> Tensor:
        scales = self._read(".absmax").flatten()
        if "nested_blocksize" not in self.said:
            return scales.float()
        shared, table = (self._read(suffix).float() for suffix in _NESTED)
        spread = shared.flatten().repeat_interleave(self.said["nested_blocksize"])[: len(scales)]
        return table[scales.int()] * spread + self.said["nested_offset"]

    def _read(self, suffix: str) -> Tensor:
        if self.tensors.dtype_of(self.name + suffix) is None:
            raise UnsupportedModel(f"the checkpoint lacks the tensor {self.name + suffix!r}")
        return self.tensors.read(self.name + suffix)


@dataclass(frozen=True, slots=True, kw_only=True)
class OutlierMatrix:
    """INT8 with a largest magnitude for each row (LLM.int8, Dettmers et al. 2022, arXiv:2208.07339). Its library multiplies large
    activations in 16 bits, so that no kernel that rounds all of them to 8 may have it on a GPU."""

    tensors: StoredTensors
    name: str
    largest: str
    shape: tuple[int, ...]

    fits = True

    def floats(self, cut: Cut) -> Tensor:
        return self.tensors.read(self.name, cut).float() * self._scales(cut)

    def kept(self, cut: Cut, keeps: frozenset[Kind]) -> Weight | None:
        if "int8_groups" not in keeps:
            return None
        group = -(-self.shape[1] // _WORD) * _WORD
        values, scales = self.tensors.read(self.name, cut), self._scales(cut)
        return Int8Groups(values=values, scales=scales, zeros=None, group=group)

    def _scales(self, cut: Cut) -> Tensor:
        return at_runs(self.tensors.read(self.largest).float().view(-1, 1), cut[0], 0) / _LARGEST


def table_matrix(
    tensors: StoredTensors, how: Quantisation, name: str, shape: tuple[int, ...] | None
) -> TableMatrix | OutlierMatrix | None:
    """Return the matrix, if it is one of bitsandbytes. Raises UnsupportedModel where it has another shape or layout."""
    del how
    state = next((name + _STATE + kind for kind in _TYPES if tensors.dtype_of(name + _STATE + kind)), None)
    if state is not None:
        said = json.loads(bytes(tensors.read(state).tolist()))
        stored = fitting(name, said["shape"], shape)
        return TableMatrix(tensors=tensors, name=name, said=said, shape=stored)
    largest, layout = (f"{name.removesuffix('.weight')}.{suffix}" for suffix in INT8_SUFFIXES)
    if tensors.dtype_of(name) != "I8" or tensors.dtype_of(largest) is None:
        return None
    shape = require_shape(tensors, name, shape)
    if tensors.dtype_of(layout) and tensors.read(layout).any():
        raise UnsupportedModel(
            f"tensor {name!r} is laid out for one kind of GPU ({layout}): save it again with bitsandbytes 0.45 or later"
        )
    return OutlierMatrix(tensors=tensors, name=name, largest=largest, shape=shape)
