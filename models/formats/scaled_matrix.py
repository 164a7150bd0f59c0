"""Matrices of numbers of eight or four bits times scales: FP8, INT8, MXFP8, MXFP4 and NVFP4, of any publisher.

Scales are floats, or E8M0's powers of two. NVFP4's, of E4M3, have one more scale for all of them, by which ModelOpt multiplies
(`weight_scale_2`) and compressed-tensors divides (`weight_global_scale`)."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from math import prod

import torch
from torch import Tensor

from core.errors import UnsupportedModel
from kernels.packed import FourBit, Int8Groups, Kind, Weight
from kernels.packing import NVFP4_GROUP, from_mxfp4, from_nvfp4
from models.formats.packed import at_runs, divided, eight_bit_kind, eight_bits, without_rounding
from models.formats.quantised import MXFP4_GROUP, from_pairs, from_scaled, in_bytes
from models.formats.stored_matrix import Cut, StoredTensors, require_shape
from models.spec.quantisation import Number, Quantisation

_DIVISOR, _PACKED = "_global_scale", "_packed"
_SCALES, _OVERALL = ("_scale_inv", "_scale"), ("_scale_2", _DIVISOR)
SUFFIXES = (*_SCALES, *_OVERALL, _PACKED)
"""What follows the matrix's name in the names of its tensors."""
_BYTES: dict[str, Number] = {"F8_E4M3": "float8", "F8_E5M2": "float8", "I8": "int8"}
_PAIRS = ("U8", "I8")
"""Dtypes of two numbers of four bits."""
_EXPONENTS = ("U8", "F8_E8M0")
_WORD = 4
"""Numbers of a multiple of which `Int8Groups` has scales."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaledMatrix:
    """See `models.formats.stored_matrix.StoredMatrix`."""

    tensors: StoredTensors
    how: Quantisation
    name: str
    values: str
    """The name of the tensor of the numbers, which may be another."""
    shape: tuple[int, int]

    @property
    def fits(self) -> bool:
        return self._block_of(self.tensors.shape_of(self._scale_name())) is not None

    def floats(self, cut: Cut) -> Tensor:
        scales, block = self._scales()
        return from_scaled(self._numbers(cut), self._factors(scales), block, cut)

    def kept(self, cut: Cut, keeps: frozenset[Kind]) -> Weight | None:
        return self._four_bits(cut, keeps) if self._is_halved else self._eight_bits(cut, keeps)

    @property
    def _is_halved(self) -> bool:
        return self.how.number == "float4"

    def _eight_bits(self, cut: Cut, keeps: frozenset[Kind]) -> Weight | None:
        stored = self.tensors.dtype_of(self.values)
        if stored is None or not keeps & {"float8", "int8", "int8_groups"}:
            return None
        scales, block = self._scales()
        kind = eight_bit_kind(stored, self.shape, block, rounds_activations=self.how.rounds_activations)
        if kind is None or kind not in keeps:
            return None
        read, factors = partial(self.tensors.read, self.values, cut), self._factors(scales)
        given = self._input_scale()
        found = eight_bits(self.name, read, factors, block, shape=self.shape, cut=cut, input_scale=given)
        return without_rounding(found) if found is not None and kind == "int8_groups" else found

    def _four_bits(self, cut: Cut, keeps: frozenset[Kind]) -> FourBit | Int8Groups | None:
        kind = self._four_bit_kind()
        as_stored = kind in keeps
        if not as_stored and "int8_groups" not in keeps:
            return None
        scales, block = self._scales()
        if block != self.how.block or self.shape[1] % block[1] or block[1] % _WORD:
            return None
        groups = divided(self.name, cut[1], self.shape[1], block[1])
        if as_stored and kind == "mxfp4":
            return from_mxfp4(self._pairs(cut), _part(scales.view(torch.uint8), cut[0], groups))
        if as_stored:
            held = _part(scales.view(torch.uint8), cut[0], groups).view(torch.float8_e4m3fn)
            return from_nvfp4(self._pairs(cut), held, self._overall().expand(len(held)).contiguous())
        return in_bytes(self._pairs(cut), _part(self._factors(scales), cut[0], groups), block[1])

    def _four_bit_kind(self) -> Kind | None:
        """Return the kind of matrix that kernels must be able to multiply, if any can, so that it stays as it is."""
        stored, overall = self.tensors.dtype_of(self._scale_name()), self._overall_name()
        if self.how.block == (1, MXFP4_GROUP) and stored in _EXPONENTS and overall is None:
            return "mxfp4"
        return "nvfp4" if self.how.block == (1, NVFP4_GROUP) and stored == "F8_E4M3" else None

    def _numbers(self, cut: Cut) -> Tensor:
        if self._is_halved:
            return from_pairs(self._pairs(cut), torch.float32)[:, _inside_pairs(cut[1])]
        return self.tensors.read(self.values, cut)

    def _pairs(self, cut: Cut) -> Tensor:
        """Return the bytes that hold the part's numbers, the even one in the lower half."""
        halves = [slice(run.start // 2, -(-run.stop // 2)) for run in cut[1]]
        return self.tensors.read(self.values, [cut[0], halves]).view(torch.uint8)

    def _scale_name(self) -> str:
        names = [self.name + end for end in _SCALES]
        found = next((name for name in names if self.tensors.dtype_of(name)), None)
        if found is None:
            likely = names[0] if self.how.block and self.how.block[0] > 1 else names[1]
            raise UnsupportedModel(f"the checkpoint lacks the tensor {likely!r}")
        return found

    def _scales(self) -> tuple[Tensor, tuple[int, int]]:
        """Return the scales of the whole matrix as they are stored, and how many rows and columns share one."""
        name = self._scale_name()
        scales = self.tensors.read(name)
        block = self._block_of(tuple(scales.shape))
        if block is None:
            wanted = self._num_blocks(self.how.block or (1, self.shape[1]))
            raise UnsupportedModel(f"tensor {name!r} is {tuple(scales.shape)}; it must be {wanted}")
        return scales.view(self._num_blocks(block)), block

    def _block_of(self, scales: Sequence[int]) -> tuple[int, int] | None:
        """Return how many rows and columns share a scale of a tensor of this shape; None where it cannot be this matrix's."""
        if prod(scales) == 1:
            return self.shape
        block = self.how.block or (1, self.shape[1])
        blocks = self._num_blocks(block)
        # ModelOpt's blocks have dimensions of their own.
        sizes = [size for size in scales if size > 1 or len(scales) <= 2]
        if sizes == [*blocks] or (sizes == [blocks[0]] and blocks[1] == 1):
            return block
        by_groups = self.how.block is None and len(sizes) == 2 and sizes[0] == self.shape[0]
        return (1, self.shape[1] // sizes[1]) if by_groups and self.shape[1] % sizes[1] == 0 else None

    def _num_blocks(self, block: tuple[int, int]) -> tuple[int, int]:
        outputs, inputs = self.shape
        return -(-outputs // block[0]), -(-inputs // block[1])

    def _factors(self, scales: Tensor) -> Tensor:
        """Return what the numbers are multiplied with, in float32."""
        if scales.dtype == torch.uint8:
            scales = scales.view(torch.float8_e8m0fnu)
        return scales.float() * self._overall()

    def _overall(self) -> Tensor:
        """Return (1,) float32, what all scales are multiplied with."""
        name = self._overall_name()
        if name is None:
            return torch.ones(1)
        overall = self.tensors.read(name).float()
        if overall.numel() != 1:
            raise UnsupportedModel(f"tensor {name!r} is {tuple(overall.shape)}; it must be one number")
        return (1 / overall if name.endswith(_DIVISOR) else overall).view(1)

    def _overall_name(self) -> str | None:
        names = (self.name + end for end in _OVERALL)
        return next((name for name in names if self.tensors.dtype_of(name)), None)

    def _input_scale(self) -> Tensor | None:
        """Return (1,) float32, the scale of everything that is multiplied with the matrix, if the checkpoint has one."""
        stem = self.name.removesuffix(".weight")
        names = (f"{stem}.{what}_scale" for what in ("input", "activation"))
        own = next((name for name in names if self.tensors.dtype_of(name)), None)
        scale = None if own is None else self.tensors.read(own)
        return scale.float().view(1) if scale is not None and scale.numel() == 1 else None


def scaled_matrix(
    tensors: StoredTensors, how: Quantisation, name: str, shape: tuple[int, ...] | None
) -> ScaledMatrix | None:
    """Return the matrix, if it is stored in this way. Raises UnsupportedModel where it has another shape."""
    values = _of_halves(tensors, name, shape) if how.number == "float4" else _of_bytes(tensors, how, name)
    if values is None:
        return None
    shape = require_shape(tensors, values, shape, times=2 if how.number == "float4" else 1)
    if len(shape) != 2:
        raise UnsupportedModel(f"tensor {name!r} has few bits and is no matrix, which is not supported")
    return ScaledMatrix(tensors=tensors, how=how, name=name, values=values, shape=(shape[0], shape[1]))


def _of_bytes(tensors: StoredTensors, how: Quantisation, name: str) -> str | None:
    return name if _BYTES.get(tensors.dtype_of(name) or "") == how.number else None


def _of_halves(tensors: StoredTensors, name: str, shape: tuple[int, ...] | None) -> str | None:
    """Return the name of the tensor of two numbers a byte: ModelOpt's has the matrix's own."""
    if tensors.dtype_of(name + _PACKED) in _PAIRS:
        return name + _PACKED
    if tensors.dtype_of(name) not in _PAIRS:
        return None
    if shape is None:
        return name if any(tensors.dtype_of(name + end) for end in _SCALES) else None
    return name if tensors.shape_of(name) == (*shape[:-1], shape[-1] // 2) else None


def _inside_pairs(runs: Sequence[slice]) -> Tensor:
    """Return where the elements of runs are among those of the pairs that hold them."""
    found: list[Tensor] = []
    at = 0
    for run in runs:
        first = at + run.start % 2
        found.append(torch.arange(first, first + run.stop - run.start))
        at += 2 * (-(-run.stop // 2) - run.start // 2)
    return torch.cat(found)


def _part(tensor: Tensor, rows: Sequence[slice], columns: Sequence[slice]) -> Tensor:
    return at_runs(at_runs(tensor, rows, 0), columns, 1).contiguous()
