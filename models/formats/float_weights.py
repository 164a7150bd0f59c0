"""All tensors of a quantised checkpoint as floats, under the names that its files have: for layers that transformers computes."""

from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch
from safetensors import safe_open
from torch import Tensor

from core.errors import UnsupportedModel
from models.formats.checkpoint import whole
from models.formats.packed_words import MARKS, SUFFIXES, WORD_BITS, from_words
from models.formats.quantised import from_scaled
from models.spec.quantisation import Quantisation

_SCALED: Final = (torch.float8_e4m3fn, torch.int8)
_FLOATS: Final = (torch.float32, torch.bfloat16, torch.float16)
_SCALES: Final = ("_scale_inv", "_scale")


def float_weights(folder: Path, how: Quantisation, dtype: torch.dtype) -> dict[str, Tensor]:
    """Return the tensors in `dtype`. Raises UnsupportedModel for what is stored in another way than `how` says."""
    files: dict[str, Any] = {}
    for path in sorted(folder.glob("*.safetensors")):
        file: Any = safe_open(path, "pt", device="cpu")
        files |= dict.fromkeys(file.keys(), file)
    return {name: tensor.to(dtype) for name, tensor in _floats(files, how)}


def _floats(files: Mapping[str, Any], how: Quantisation) -> Iterator[tuple[str, Tensor]]:
    mark = MARKS.get(how.kind, "")
    for name in files:
        stem, _, suffix = name.rpartition(".")
        if mark and f"{stem}.{mark}" in files and suffix in SUFFIXES:
            if suffix == mark:
                fetch = partial(_fetch, files, stem)
                yield f"{stem}.weight", from_words(how, fetch, stem, _shape(how, fetch))
        elif not name.endswith(_SCALES):
            tensor = files[name].get_tensor(name)
            yield name, _scaled(files, how, name, tensor) if tensor.dtype in _SCALED else tensor


def _fetch(files: Mapping[str, Any], stem: str, suffix: str) -> Tensor | None:
    name = f"{stem}.{suffix}"
    return files[name].get_tensor(name) if name in files else None


def _shape(how: Quantisation, fetch: partial[Tensor | None]) -> tuple[int, int]:
    """Return (outputs, inputs) of a matrix that is stored in words."""
    words = fetch(MARKS[how.kind])
    assert words is not None, "a matrix is recognised by its words"
    rows, columns = words.shape
    each = WORD_BITS // how.bits
    if how.kind == "awq":
        return columns * each, rows
    if how.kind == "gptq":
        order = fetch("g_idx")
        return columns, rows * each if order is None else len(order)
    written = fetch("weight_shape")
    if written is None:
        return rows, columns * each
    outputs, inputs = (int(size) for size in written)
    return outputs, inputs


def _scaled(files: Mapping[str, Any], how: Quantisation, name: str, values: Tensor) -> Tensor:
    own = next((name + end for end in _SCALES if name + end in files), None)
    if how.kind != "scaled" or own is None or values.ndim != 2:
        raise UnsupportedModel(
            f"tensor {name!r} is stored as {str(values.dtype).removeprefix('torch.')} without its scales, or "
            "is no matrix"
        )
    scales, (outputs, inputs) = files[own].get_tensor(own), values.shape
    if scales.dtype not in _FLOATS:
        raise UnsupportedModel(
            f"tensor {own!r} has exponents, which are not read where transformers computes the layers: use scales that are "
            "floats, such as those of FP8"
        )
    shape = (int(outputs), int(inputs))
    if scales.numel() == 1:
        return from_scaled(values, scales.view(1, 1), shape, whole(name, shape))
    rows, columns = how.block or (1, shape[1])
    blocks = -(-shape[0] // rows), -(-shape[1] // columns)
    if scales.numel() != blocks[0] * blocks[1]:
        raise UnsupportedModel(f"tensor {own!r} is {tuple(scales.shape)}; it must be {blocks}")
    return from_scaled(values, scales.view(blocks), (rows, columns), whole(name, shape))
