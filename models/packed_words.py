"""Matrices of four bits as AutoAWQ, GPTQ and compressed-tensors store them, made float32: eight numbers to a 32-bit word,
(number - zero) * scale, with scale and zero shared by a group of inputs."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from core.errors import UnsupportedModel
from models.quantisation import Quantisation

Fetch = Callable[[str], Tensor | None]
"""Returns the whole tensor of that suffix behind the matrix's name, if the checkpoint has it."""

MARKS = {"awq": "qweight", "gptq": "qweight", "packed": "weight_packed"}
"""The tensor by which a matrix of four bits is recognised."""
SUFFIXES = (
    "qweight", "qzeros", "scales", "g_idx", "weight_packed", "weight_scale", "weight_zero_point", "weight_shape", "weight_g_idx",
)  # fmt: skip
_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""The column that each four bits of a word hold, the lowest first."""
_IN_ORDER = tuple(range(8))
_SIGNED = 8
"""The number that compressed-tensors adds to numbers and zero points, so that none is negative."""


def from_four_bits(how: Quantisation, fetch: Fetch, name: str, shape: tuple[int, ...]) -> Tensor:
    """Return (outputs, inputs) float32. Raises UnsupportedModel where the tensors do not fit `shape`."""
    outputs, inputs = shape

    def get(suffix: str, *sizes: int) -> Tensor | None:
        tensor = fetch(suffix)
        if tensor is not None and tensor.shape != sizes:
            raise UnsupportedModel(
                f"tensor {name + '.' + suffix!r} is {tuple(tensor.shape)}; it must be {sizes}"
            )
        return tensor

    def need(suffix: str, *sizes: int) -> Tensor:
        tensor = get(suffix, *sizes)
        if tensor is None:
            raise UnsupportedModel(f"the checkpoint lacks the tensor {name + '.' + suffix!r}")
        return tensor

    size = how.group or inputs
    groups, words = -(-inputs // size), -(-outputs // 8)
    order = get("weight_g_idx" if how.kind == "packed" else "g_idx", inputs)
    group = torch.arange(inputs) // size if order is None else order.long()
    if how.kind == "packed":
        numbers = _unpack(need("weight_packed", outputs, -(-inputs // 8)), 1)[:, :inputs] - _SIGNED
        scales = need("weight_scale", outputs, groups).float()
        stored = get("weight_zero_point", words, groups)
        zeros = torch.zeros_like(scales) if stored is None else _unpack(stored, 0)[:outputs] - _SIGNED
        return (numbers - zeros[:, group]) * scales[:, group]
    nibbles = _AWQ_ORDER if how.kind == "awq" else _IN_ORDER
    zeros = _unpack(need("qzeros", groups, words), 1, nibbles) + how.zero_offset
    scales = need("scales", groups, outputs).float()
    if how.kind == "awq":
        numbers = _unpack(need("qweight", inputs, words), 1, nibbles)
    else:
        numbers = _unpack(need("qweight", -(-inputs // 8), outputs), 0)
    return ((numbers - zeros[group]) * scales[group]).T.contiguous()


def _unpack(words: Tensor, dim: int, order: Sequence[int] = _IN_ORDER) -> Tensor:
    """Unpack int32 into eight times as many along `dim`. The number in a word's lowest bits comes to order[0] of its eight."""
    shifts = torch.tensor([4 * order.index(i) for i in range(8)], dtype=torch.int32)
    return ((words.unsqueeze(dim + 1) >> shifts.view(-1, *(1,) * (1 - dim))) & 15).flatten(dim, dim + 1)
