"""Matrices of HQQ: whole numbers of 1 to 8 bits, (number - zero) * scale, where a group along either axis shares both.

Zeros are no whole numbers, so that no kernel reads them. HQQ makes them 16 bits, and so does a CPU that keeps 16 bits."""

from dataclasses import dataclass

import torch
from torch import Tensor

from core.errors import UnsupportedModel
from kernels.packed import Kind, Weight
from models.files.cuts import indices
from models.formats.stored_matrix import Cut, StoredTensors, fitting
from models.spec.quantisation import Quantisation

_NUMBERS = "W_q"
SUFFIXES = (
    _NUMBERS, "scale", "zero", "nbits", "group_size", "axis", "shape", "packing", "unpack_view_dtype", "view_as_float",
    "channel_wise", "compute_dtype", "encoded_state_dict", "offload_meta", "optimize", "quant_scale", "quant_zero", "round_zero",
    "stores_quant_config",
)  # fmt: skip
"""What stands in place of `weight` in the names of its tensors."""
_HALVES = (torch.bfloat16, torch.float16)
_IN_WORD = {1: 8, 2: 4, 3: 10, 4: 2, 8: 1}
"""How many numbers of so many bits are in a byte, or those of three in 32 bits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HqqMatrix:
    """See `models.formats.stored_matrix.StoredMatrix`."""

    tensors: StoredTensors
    stem: str
    """The matrix's name without `.weight`."""
    shape: tuple[int, ...]

    fits = True

    def floats(self, cut: Cut) -> Tensor:
        rows, columns = indices(cut)
        return self._whole()[rows][:, columns]

    def kept(self, cut: Cut, keeps: frozenset[Kind]) -> Weight | None:
        dtype = self._read("scale").dtype
        return self.floats(cut).to(dtype) if "half" in keeps and dtype in _HALVES else None

    def _whole(self) -> Tensor:
        scale, zero = self._read("scale").float(), self._read("zero").float()
        size = self.shape[0] * self.shape[1] // scale.numel()
        by_columns = int(self._read("axis")) == 0
        numbers = self._unpacked(size if by_columns else scale.numel()).float()
        form = (1, -1) if by_columns else (-1, 1)
        return ((numbers - zero.view(form)) * scale.view(form)).reshape(self.shape)

    def _unpacked(self, rows: int) -> Tensor:
        """Words hold numbers of as many equal parts of the rows, the first in the highest bits."""
        bits = int(self._read("nbits"))
        if bits not in _IN_WORD:
            raise UnsupportedModel(
                f"tensor {self.stem + '.W_q'!r} has {bits} bits ({', '.join(map(str, _IN_WORD))} are supported)"
            )
        words = self._read(_NUMBERS)
        if words.is_floating_point():
            words = words.view(torch.int32 if bits == 3 else torch.uint8)
        last = _IN_WORD[bits] - 1
        parts = [words >> bits * (last - part) & 2**bits - 1 for part in range(last + 1)]
        return torch.cat(parts)[:rows]

    def _read(self, suffix: str) -> Tensor:
        return _read(self.tensors, self.stem, suffix)


def hqq_matrix(
    tensors: StoredTensors, how: Quantisation, name: str, shape: tuple[int, ...] | None
) -> HqqMatrix | None:
    """Return the matrix, if it is one of HQQ. Raises UnsupportedModel where it has another shape."""
    del how
    stem = name.removesuffix(".weight")
    if tensors.dtype_of(f"{stem}.{_NUMBERS}") is None:
        return None
    stored = fitting(name, _read(tensors, stem, "shape").tolist(), shape)
    return HqqMatrix(tensors=tensors, stem=stem, shape=stored)


def _read(tensors: StoredTensors, stem: str, suffix: str) -> Tensor:
    name = f"{stem}.{suffix}"
    if tensors.dtype_of(name) is None:
        raise UnsupportedModel(
            f"the checkpoint lacks the tensor {name!r}, without which Baton cannot read HQQ"
        )
    return tensors.read(name)
