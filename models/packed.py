"""A rank's part of a matrix as small as the checkpoint stores it, where kernels can multiply it so.

A part begins and ends where groups of inputs, blocks of scales and words do: what would cut through one is refused."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from core.errors import UnsupportedModel
from kernels.packed import BLOCK, SCALE_BLOCK, EightBit, FourBit, Kind
from kernels.packing import from_awq, from_compressed, from_gptq
from models.quantisation import Quantisation

Runs = Sequence[slice]
Fetch = Callable[[str, Sequence[Runs] | None], Tensor | None]
"""(suffix behind the matrix's name, part or None for all) -> that part of the tensor, if the checkpoint has it."""

_KINDS: dict[str, Kind] = {"F8_E4M3": "float8", "I8": "int8"}
_WORD = 8
"""Numbers of four bits in a word."""


def eight_bit_kind(how: Quantisation, stored: str, shape: tuple[int, ...]) -> Kind | None:
    """Return the kind of matrix that kernels must be able to multiply for `shape`, if any can. `stored` is safetensors' name of
    its dtype."""
    kind = _KINDS.get(stored)
    blocks = how.block in (None, (SCALE_BLOCK, SCALE_BLOCK))
    unit = SCALE_BLOCK if how.block else 16
    fits = len(shape) == 2 and blocks and shape[1] % unit == 0
    return kind if how.rounds_activations and fits else None


def eight_bits(
    name: str, read: Callable[[], Tensor], scales: Tensor, block: tuple[int, int], *, shape: tuple[int, ...], cut: Sequence[Runs],
    input_scale: Tensor | None = None,
) -> EightBit | None:  # fmt: skip
    """Return this rank's part. `scales` (rows / block[0], columns / block[1]) are all of the matrix's, and `input_scale` is its
    inputs'. None where the part has too odd a width."""
    rows, columns = cut
    if block == (SCALE_BLOCK, SCALE_BLOCK):
        parts = [_divided(name, runs, size, SCALE_BLOCK) for runs, size in zip(cut, shape, strict=True)]
        return EightBit(read(), _at(_at(scales, parts[0], 0), parts[1], 1).float().contiguous())
    if sum(run.stop - run.start for run in columns) % 16:
        return None
    each = scales.expand(shape[0], 1) if scales.shape[0] == 1 else scales
    return EightBit(read(), _at(each, rows, 0)[:, 0].float().contiguous(), input_scale)


def four_bits(
    how: Quantisation, name: str, fetch: Fetch, shape: tuple[int, ...], cut: Sequence[Runs]
) -> FourBit | None:
    """Return this rank's part. None where kernels have no layout for it: groups of other sizes, an activation order, a number of
    rows or columns that does not fill its words. Raises UnsupportedModel where the cut falls inside a group."""
    outputs, inputs = shape
    group = how.group or inputs
    whole = group >= inputs
    if outputs % _WORD or inputs % _WORD or not (whole or group in (16, 32, 64) or group % BLOCK == 0):
        return None
    order = fetch("weight_g_idx" if how.kind == "packed" else "g_idx", None)
    if order is not None and not torch.equal(order.long(), torch.arange(inputs) // group):
        return None
    rows, columns = cut
    row_words = _divided(name, rows, outputs, _WORD)
    column_words = _divided(name, columns, inputs, _WORD)
    groups = [slice(0, 1)] if whole else _divided(name, columns, inputs, group)

    def need(suffix: str, *part: Runs) -> Tensor:
        tensor = fetch(suffix, part)
        if tensor is None:
            raise UnsupportedModel(f"the checkpoint lacks the tensor {name + '.' + suffix!r}")
        return tensor

    held = sum(run.stop - run.start for run in columns)
    size = -(-held // BLOCK) * BLOCK if whole else group
    match how.kind:
        case "awq":
            words, zeros = need("qweight", columns, row_words), need("qzeros", groups, row_words)
            return from_awq(words, zeros, need("scales", groups, rows), size)
        case "gptq":
            words, zeros = need("qweight", column_words, rows), need("qzeros", groups, row_words)
            return from_gptq(words, zeros, need("scales", groups, rows), size, how.zero_offset)
        case _:
            words, zeros = (
                need("weight_packed", rows, column_words),
                fetch("weight_zero_point", (row_words, groups)),
            )
            return from_compressed(words, zeros, need("weight_scale", rows, groups), size)


def _divided(name: str, runs: Runs, size: int, unit: int) -> list[slice]:
    """Return runs of a dimension of `size` elements as runs of groups of `unit`. Raises UnsupportedModel."""
    for run in runs:
        if run.start % unit or (run.stop % unit and run.stop != size):
            raise UnsupportedModel(
                f"tensor {name!r} would be cut at {run.start} and {run.stop} of {size}, inside a group of {unit} that share a "
                "scale or a word: choose another tp, or engine.kernels=torch, which makes weights floats"
            )
    return [slice(run.start // unit, -(-run.stop // unit)) for run in runs]


def _at(tensor: Tensor, runs: Runs, dim: int) -> Tensor:
    index: list[Any] = [i for run in runs for i in range(run.start, run.stop)]
    return tensor[index] if dim == 0 else tensor[:, index]
