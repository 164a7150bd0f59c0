"""Matrices of torchao, as it writes safetensors: a file's header says of which class each was, and its tensors have other names.

Nothing of it is run: the classes that are read here are plain numbers, scales and zero points."""

import json
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from core.errors import UnsupportedModel
from kernels.packed import Int8Groups, Kind, Weight
from models.files.cuts import indices
from models.formats.packed import at_runs, divided
from models.formats.scaled_matrix import ScaledMatrix
from models.formats.stored_matrix import Cut, StoredMatrix, StoredTensors, require_shape
from models.spec.quantisation import Quantisation

_STEM, _WEIGHT = "._weight", ".weight"
_NUMBERS, _SCALE, _ZERO = "_qdata", "_scale", "_zero_point"
SUFFIXES = tuple(_STEM[1:] + end for end in (_NUMBERS, _SCALE, _ZERO))
"""What stands in place of `weight` in the names of its tensors."""
_SCALED = {"Float8Tensor": "float8", "Int8Tensor": "int8"}
_WHOLE, _HALVED = "IntxUnpackedToInt8Tensor", "Int4Tensor"
CLASSES = (*_SCALED, _WHOLE, _HALVED)
_WORD = 4
"""Numbers of a multiple of which `Int8Groups` has scales."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WholeMatrix:
    """(number - zero) * scale, each of both shared by a block. See `models.formats.stored_matrix.StoredMatrix`."""

    tensors: StoredTensors
    name: str
    """What the names of its tensors begin with."""
    shape: tuple[int, ...]

    fits = True

    def floats(self, cut: Cut) -> Tensor:
        scales, zeros, block = self._shared()
        rows, columns = (index // size for index, size in zip(indices(cut), block, strict=True))
        numbers = self.tensors.read(self.name + _NUMBERS, cut).float()
        return (numbers - zeros.float()[rows][:, columns]) * scales.float()[rows][:, columns]

    def kept(self, cut: Cut, keeps: frozenset[Kind]) -> Weight | None:
        scales, zeros, (rows, group) = self._shared()
        inputs = self.shape[1]
        if (
            "int8_groups" not in keeps
            or rows != 1
            or zeros.is_floating_point()
            or (group < inputs and group % _WORD)
        ):
            return None
        groups = divided(self.name, cut[1], inputs, group) if group < inputs else [slice(0, 1)]
        scales, zeros = (
            at_runs(at_runs(each, cut[0], 0), groups, 1).contiguous() for each in (scales, zeros)
        )
        return Int8Groups(
            values=self.tensors.read(self.name + _NUMBERS, cut),
            scales=scales,
            zeros=zeros.to(torch.int16) if zeros.any() else None,
            group=group if group < inputs else -(-inputs // _WORD) * _WORD,
        )

    def _shared(self) -> tuple[Tensor, Tensor, tuple[int, int]]:
        """Return scales, zero points, and the rows and columns of a block."""
        scales, zeros = (self.tensors.read(self.name + end) for end in (_SCALE, _ZERO))
        sizes = zip(self.shape, scales.shape, strict=True)
        rows, columns = (size // count for size, count in sizes)
        return scales, zeros, (rows, columns)


@dataclass(frozen=True, slots=True, kw_only=True)
class SignedHalves:
    """number * scale + zero, of numbers from -8 to 7, two to a byte; scales and zeros are (groups, outputs). See
    `models.formats.stored_matrix.StoredMatrix`."""

    tensors: StoredTensors
    name: str
    shape: tuple[int, ...]

    fits = True

    def floats(self, cut: Cut) -> Tensor:
        rows, columns = indices(cut)
        whole = [slice(0, self.shape[1] // 2)]
        pairs = self.tensors.read(self.name + _NUMBERS, [cut[0], whole]).view(torch.uint8)
        nibbles = torch.stack((pairs & 15, pairs >> 4), -1).flatten(1)[:, columns].float()
        numbers = torch.where(nibbles > 7, nibbles - 16, nibbles)
        scales, zeros = (self.tensors.read(self.name + end).float().T[rows] for end in (_SCALE, _ZERO))
        group = columns // (self.shape[1] // scales.shape[1])
        return numbers * scales[:, group] + zeros[:, group]

    def kept(self, cut: Cut, keeps: frozenset[Kind]) -> Weight | None:
        """Zeros are no whole numbers of scales, so that no kernel has them."""
        scales = self.tensors.dtype_of(self.name + _SCALE)
        dtype = {"BF16": torch.bfloat16, "F16": torch.float16}.get(scales or "")
        return None if dtype is None or "half" not in keeps else self.floats(cut).to(dtype)


def torchao_matrix(
    tensors: StoredTensors, how: Quantisation, name: str, shape: tuple[int, ...] | None
) -> StoredMatrix | None:
    """Return the matrix, if it is one of torchao. Raises UnsupportedModel where it has another shape, or is of a class that is
    not read."""
    del how
    own = name.removesuffix(_WEIGHT) + _STEM
    if tensors.dtype_of(own + _NUMBERS) is None:
        return None
    said: dict[str, Any] = json.loads(tensors.note(name) or "{}")
    kind, data = said.get("_type"), said.get("_data") or {}
    if kind not in CLASSES:
        raise UnsupportedModel(
            f"tensor {name!r} is stored as torchao's {kind}, which is not supported: of torchao {', '.join(CLASSES)} are"
        )
    shape = require_shape(tensors, own + _NUMBERS, shape, times=2 if kind == _HALVED else 1)
    if kind in _SCALED and tensors.dtype_of(own + _ZERO) is None:
        number = "float8" if kind == "Float8Tensor" else "int8"
        rows, columns = data.get("block_size") or shape
        how = Quantisation(
            kind="scaled",
            number=number,
            block=(rows, columns) if 1 < rows < shape[0] else None,
            rounds_activations=data.get("act_quant_kwargs") is not None,
        )
        return ScaledMatrix(
            tensors=tensors, how=how, name=own, values=own + _NUMBERS, shape=(shape[0], shape[1])
        )
    if kind == _HALVED:
        return SignedHalves(tensors=tensors, name=own, shape=shape)
    return WholeMatrix(tensors=tensors, name=own, shape=shape)
