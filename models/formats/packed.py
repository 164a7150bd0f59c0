"""A rank's part of a matrix as small as the checkpoint stores it, where kernels can multiply it so.

A part begins and ends where groups of inputs, blocks of scales and words do: what would cut through one is refused."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from core.errors import UnsupportedModel
from kernels.packed import BLOCK, SCALE_BLOCK, EightBit, FourBit, Int8Groups, Kind
from kernels.packing import from_awq, from_compressed, from_gptq
from models.files.cuts import indices
from models.formats.packed_words import MARKS, WORD_BITS, from_words, unpacked
from models.formats.stored_matrix import Cut, StoredTensors
from models.spec.quantisation import Quantisation

Runs = Sequence[slice]
Fetch = Callable[[str, Sequence[Runs] | None], Tensor | None]
"""(suffix behind the matrix's name, part or None for all) -> that part of the tensor, if the checkpoint has it."""

_KINDS: dict[str, Kind] = {"F8_E4M3": "float8", "I8": "int8"}
_WORD_8 = 4
"""Numbers of eight bits in a word."""
_OFFSET = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class WordMatrix:
    """A matrix of AutoAWQ, GPTQ or compressed-tensors. See `models.formats.stored_matrix.StoredMatrix`."""

    tensors: StoredTensors
    how: Quantisation
    stem: str
    """The matrix's name without `.weight`."""
    shape: tuple[int, ...]

    @property
    def fits(self) -> bool:
        outputs, inputs = self.shape
        words = outputs, -(-inputs * self.how.bits // WORD_BITS)
        groups = outputs, -(-inputs // (self.how.group or inputs))
        sizes = {"weight_packed": words, "weight_scale": groups}
        return self.how.kind != "packed" or all(
            self.tensors.shape_of(f"{self.stem}.{suffix}") == size for suffix, size in sizes.items()
        )

    def floats(self, cut: Cut) -> Tensor:
        rows, columns = indices(cut)
        return from_words(self.how, self._fetch, self.stem, self.shape)[rows][:, columns]

    def kept(self, cut: Cut, keeps: frozenset[Kind]) -> FourBit | Int8Groups | None:
        if ("four_bit" if self.how.bits == 4 else "int8_groups") not in keeps:
            return None
        return whole_numbers(self.how, self.stem, self._fetch, self.shape, cut)

    def _fetch(self, suffix: str, cut: Cut | None = None) -> Tensor | None:
        name = f"{self.stem}.{suffix}"
        return self.tensors.read(name, cut) if self.tensors.dtype_of(name) else None


def word_matrix(
    tensors: StoredTensors, how: Quantisation, name: str, shape: tuple[int, ...] | None
) -> WordMatrix | None:
    """Return the matrix, if it is stored in this way."""
    stem = name.removesuffix(".weight")
    if tensors.dtype_of(f"{stem}.{MARKS[how.kind]}") != "I32":
        return None
    return WordMatrix(tensors=tensors, how=how, stem=stem, shape=shape or _stored_shape(tensors, how, stem))


def _stored_shape(tensors: StoredTensors, how: Quantisation, stem: str) -> tuple[int, ...]:
    rows, columns = tensors.shape_of(f"{stem}.{MARKS[how.kind]}")
    each, order, written = WORD_BITS // how.bits, f"{stem}.g_idx", f"{stem}.weight_shape"
    if how.kind == "awq":
        return columns * each, rows
    if how.kind == "gptq":
        return columns, tensors.shape_of(order)[0] if tensors.dtype_of(order) else rows * each
    if tensors.dtype_of(written):
        return tuple(map(int, tensors.read(written)))
    return rows, columns * each


def eight_bit_kind(
    stored: str, shape: tuple[int, ...], block: tuple[int, ...], *, rounds_activations: bool
) -> Kind | None:
    """Return the kind of matrix that kernels must be able to multiply for `shape`, if any can. `stored` is safetensors' name of
    its dtype, and `block` the rows and columns that share a scale."""
    kind = _KINDS.get(stored)
    by_blocks = block == (SCALE_BLOCK, SCALE_BLOCK)
    by_rows = block[0] in (1, shape[0]) and block[1] == shape[1]
    fits = (by_blocks or by_rows) and shape[1] % (SCALE_BLOCK if by_blocks else 16) == 0
    if not rounds_activations and kind == "int8":
        kind = "int8_groups"
    elif not rounds_activations:
        kind = None
    return kind if fits else None


def without_rounding(weight: EightBit) -> Int8Groups:
    """Return a matrix of INT8 whose checkpoint does not say that activations are rounded too."""
    scales, group = weight.scales[:, None], -(-weight.shape[1] // _WORD_8) * _WORD_8
    if weight.by_blocks:
        scales, group = weight.scales.repeat_interleave(SCALE_BLOCK, 0)[: weight.shape[0]], SCALE_BLOCK
    return Int8Groups(values=weight.values, scales=scales, zeros=None, group=group)


def eight_bits(
    name: str, read: Callable[[], Tensor], scales: Tensor, block: tuple[int, int], *, shape: tuple[int, ...], cut: Sequence[Runs],
    input_scale: Tensor | None = None,
) -> EightBit | None:  # fmt: skip
    """Return this rank's part. `scales` (rows / block[0], columns / block[1]) are all of the matrix's, and `input_scale` is its
    inputs'. None where the part has too odd a width."""
    rows, columns = cut
    if block == (SCALE_BLOCK, SCALE_BLOCK):
        parts = [divided(name, runs, size, SCALE_BLOCK) for runs, size in zip(cut, shape, strict=True)]
        return EightBit(read(), at_runs(at_runs(scales, parts[0], 0), parts[1], 1).float().contiguous())
    if sum(run.stop - run.start for run in columns) % 16:
        return None
    each = scales.expand(shape[0], 1) if scales.shape[0] == 1 else scales
    return EightBit(read(), at_runs(each, rows, 0)[:, 0].float().contiguous(), input_scale)


def whole_numbers(
    how: Quantisation, name: str, fetch: Fetch, shape: tuple[int, ...], cut: Sequence[Runs]
) -> FourBit | Int8Groups | None:
    """Return this rank's part of a matrix that is packed into words. None where kernels have no layout for it: groups of other
    sizes, an activation order, a number of rows or columns that does not fill its words. Raises UnsupportedModel where the cut
    falls inside a group."""
    outputs, inputs = shape
    group, each = how.group or inputs, WORD_BITS // how.bits
    whole = group >= inputs
    if outputs % each or inputs % each or not (whole or _has_layout(how.bits, group)):
        return None
    order = fetch("weight_g_idx" if how.kind == "packed" else "g_idx", None)
    if order is not None and not torch.equal(order.long(), torch.arange(inputs) // group):
        return None
    rows, columns = cut
    row_words = divided(name, rows, outputs, each)
    column_words = divided(name, columns, inputs, each)
    groups = [slice(0, 1)] if whole else divided(name, columns, inputs, group)

    def need(suffix: str, *part: Runs) -> Tensor:
        tensor = fetch(suffix, part)
        if tensor is None:
            raise UnsupportedModel(f"the checkpoint lacks the tensor {name + '.' + suffix!r}")
        return tensor

    held = sum(run.stop - run.start for run in columns)
    size = -(-held // BLOCK) * BLOCK if whole else group
    if how.kind == "packed":
        words, scales = need("weight_packed", rows, column_words), need("weight_scale", rows, groups)
        zeros = fetch("weight_zero_point", (row_words, groups))
        if how.bits == 8:
            return _int8_groups(words, None if zeros is None else zeros.T, scales, size)
        return from_compressed(words, zeros, scales, size)
    zeros, scales = need("qzeros", groups, row_words), need("scales", groups, rows)
    if how.kind == "awq":
        return from_awq(need("qweight", columns, row_words), zeros, scales, size)
    words = need("qweight", column_words, rows)
    if how.bits == 8:
        return _int8_groups(words.T, zeros, scales.T, size, how.zero_offset)
    return from_gptq(words, zeros, scales, size, how.zero_offset)


def _has_layout(bits: int, group: int) -> bool:
    return group % _WORD_8 == 0 if bits == 8 else group in (16, 32, 64) or group % BLOCK == 0


def _int8_groups(
    words: Tensor, zeros: Tensor | None, scales: Tensor, group: int, zero_offset: int = 0
) -> Int8Groups:
    """`words` (N, K / 4) and zeros (K / group, N / 4) int32, whose bytes have an offset of 128; scales (N, K / group)."""
    if zeros is not None:
        zeros = (unpacked(zeros, 1, 8).T + (zero_offset - _OFFSET)).to(torch.int16)
    values = (unpacked(words, 1, 8) - _OFFSET).to(torch.int8)
    return Int8Groups(values=values, scales=scales, zeros=zeros, group=group)


def divided(name: str, runs: Runs, size: int, unit: int) -> list[slice]:
    """Return runs of a dimension of `size` elements as runs of groups of `unit`. Raises UnsupportedModel."""
    for run in runs:
        if run.start % unit or (run.stop % unit and run.stop != size):
            raise UnsupportedModel(
                f"tensor {name!r} would be cut at {run.start} and {run.stop} of {size}, inside a group of {unit} that share a "
                "scale or a word: choose another tp, or make weights floats, by model.dtype=float32 on a CPU and by "
                "engine.kernels=torch on a GPU"
            )
    return [slice(run.start // unit, -(-run.stop // unit)) for run in runs]


def at_runs(tensor: Tensor, runs: Runs, dim: int) -> Tensor:
    """Return what a matrix has in these rows (`dim` 0) or columns (1)."""
    index: list[Any] = [i for run in runs for i in range(run.start, run.stop)]
    return tensor[index] if dim == 0 else tensor[:, index]
