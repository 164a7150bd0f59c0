"""Matrices of four and eight bits as AutoAWQ, GPTQ and compressed-tensors pack them, made float32: eight or four numbers to a
32-bit word, (number - zero) * scale, with scale and zero shared by a group of inputs."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from core.errors import UnsupportedModel
from models.spec.quantisation import Quantisation

Fetch = Callable[[str], Tensor | None]
"""Returns the whole tensor of that suffix behind the matrix's name, if the checkpoint has it."""

MARKS = {"awq": "qweight", "gptq": "qweight", "packed": "weight_packed"}
"""The tensor by which such a matrix is recognised."""
SUFFIXES = (
    "qweight", "qzeros", "scales", "g_idx", "weight_packed", "weight_scale", "weight_zero_point", "weight_shape", "weight_g_idx",
)  # fmt: skip
_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""The column that each four bits of a word hold, the lowest first."""
WORD_BITS = 32


def from_words(how: Quantisation, fetch: Fetch, name: str, shape: tuple[int, ...]) -> Tensor:
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

    size, each = how.group or inputs, WORD_BITS // how.bits
    groups, words, column_words = -(-inputs // size), -(-outputs // each), -(-inputs // each)
    signed = (
        1 << how.bits - 1
    )  # What compressed-tensors adds to numbers and zero points, so that none is negative.
    order = get("weight_g_idx" if how.kind == "packed" else "g_idx", inputs)
    group = torch.arange(inputs) // size if order is None else order.long()
    if how.kind == "packed":
        numbers = unpacked(need("weight_packed", outputs, column_words), 1, how.bits)[:, :inputs] - signed
        scales = need("weight_scale", outputs, groups).float()
        stored = get("weight_zero_point", words, groups)
        zeros = torch.zeros_like(scales)
        if stored is not None:
            zeros = unpacked(stored, 0, how.bits)[:outputs] - signed
        return (numbers - zeros[:, group]) * scales[:, group]
    inside = _AWQ_ORDER if how.kind == "awq" else range(each)
    zeros = unpacked(need("qzeros", groups, words), 1, how.bits, inside)[:, :outputs] + how.zero_offset
    scales = need("scales", groups, outputs).float()
    if how.kind == "awq":
        numbers = unpacked(need("qweight", inputs, words), 1, how.bits, inside)[:, :outputs]
    else:
        numbers = unpacked(need("qweight", column_words, outputs), 0, how.bits)[:inputs]
    return ((numbers - zeros[group]) * scales[group]).T.contiguous()


def unpacked(words: Tensor, dim: int, bits: int, order: Sequence[int] = ()) -> Tensor:
    """Unpack int32 into several times as many along `dim`. The number in a word's lowest bits comes to order[0] of its word's;
    without an order, to the first."""
    count = WORD_BITS // bits
    order = order or range(count)
    shifts = torch.tensor([bits * order.index(i) for i in range(count)], dtype=torch.int32)
    shifted = words.unsqueeze(dim + 1) >> shifts.view(-1, *(1,) * (1 - dim))
    return (shifted & (1 << bits) - 1).flatten(dim, dim + 1)
