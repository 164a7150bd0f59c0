"""Products with matrices in panels (`src/layout.h`), as the torch operator `baton::linear`.

float32, bfloat16 and float16 are added up in float32. With fewer bits each row of inputs is rounded to 8 as it comes, by its
largest magnitude; products are exact within a group of inputs that share a scale. A row's result has the same bits whatever other
rows come with it, and however many threads compute it. `Isa.rounds_rows` says who rounds rows to bfloat16 for matrices of it."""

from dataclasses import dataclass
from enum import IntEnum
from functools import cache
from typing import Final

import torch
from torch import Tensor

from kernels.cpu.library import Isa, fastest_exact, fastest_of_bytes, loaded
from kernels.cpu.pages import large_pages, result
from kernels.packed import Prepacked

MOST_INPUTS_OF_BYTES: Final = 65_536
"""Sums of products of bytes, 255 times 127, have 32 bits."""


class Layout(IntEnum):
    """Formats, as `src/layout.h` numbers them."""

    FLOAT32 = 0
    BFLOAT16 = 1
    FLOAT16 = 2
    INT8 = 3
    INT4 = 4
    """As checkpoints have them: each group of inputs has a scale."""
    STEPS4 = 5
    """4 bits that are made of floats: 32 inputs have a step, a whole number of at most 15, and more of them share a scale."""


TASK_ROWS: Final = 96
"""Rows that a panel is multiplied with before the next one is, as `src/linear.cpp` has it."""
_FLOATS: Final = {
    torch.float32: Layout.FLOAT32,
    torch.bfloat16: Layout.BFLOAT16,
    torch.float16: Layout.FLOAT16,
}
_torch_library = torch.library.Library("baton", "DEF")
_torch_library.define(
    "linear(Tensor x, Tensor panels, Tensor? bias, int outputs, int layout, int group, int zero_bytes, int scales, int isa)"
    " -> Tensor"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Panels:
    """A matrix (N, K)."""

    data: Tensor
    """uint8"""
    outputs: int
    inputs: int
    layout: Layout
    group: int = 0
    """Inputs that share a scale, with less than 16 bits."""
    zero_bytes: int = 0
    """Bytes of a zero point: 2, or 1 with INT4; 0 where there are none."""
    scales: Layout = Layout.FLOAT32
    isa: Isa

    @property
    def shape(self) -> tuple[int, int]:
        return self.outputs, self.inputs

    @property
    def has_rows(self) -> bool:
        """Whether `rows` can be called."""
        return self.layout <= Layout.INT4

    def rows(self, numbers: Tensor) -> Tensor:
        """(T,) int64 -> those rows of the matrix, (T, K) float32. Raises IndexError for others than it has."""
        if numbers.dim() != 1 or numbers.dtype != torch.int64 or not self.has_rows:
            raise ValueError(f"numbers of rows in int64, not {tuple(numbers.shape)} of {numbers.dtype}")
        numbers, count = numbers.contiguous(), numbers.shape[0]
        out = result(count, self.inputs)
        shape = self.layout, self.outputs, self.inputs, self.group, self.zero_bytes, self.scales
        pointers = self.data.data_ptr(), numbers.data_ptr(), count, out.data_ptr()
        read = loaded().baton_rows(*shape, *pointers, torch.get_num_threads())
        if read < count:
            raise IndexError(f"row {int(numbers[read])} of a matrix of {self.outputs}")
        return out

    def product(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """(x (T, K), bias (N,) or None) -> (T, N)."""
        own = None if bias is None else bias.float().contiguous()
        about = self.outputs, self.layout, self.group, self.zero_bytes, self.scales, self.isa
        # PyTorch's way to an operator takes as long as a small product: it is gone only where somebody traces.
        multiply = torch.ops.baton.linear.default if torch.compiler.is_compiling() else _linear
        return multiply(x.float().contiguous(), self.data, own, *about).to(x.dtype)


@dataclass(frozen=True, slots=True, kw_only=True)
class InPanels(Prepacked):
    panels: Panels


def packed(matrix: Tensor, layout: Layout, group: int = 0, isa: Isa | None = None) -> Panels:
    """`matrix` (N, K) to the nearest numbers of `layout`, which is not INT4; `group`: inputs that share a scale with STEPS4, a
    multiple of 32. `isa`: the instruction set that multiplies; None: the fastest that is exact. Needs `native`."""
    _check(layout != Layout.INT4, "4 bits of a checkpoint by packed_int4, and others as STEPS4")
    matrix = (matrix if matrix.dtype in _FLOATS else matrix.float()).contiguous()
    group = -(-matrix.shape[1] // 4) * 4 if layout == Layout.INT8 else group
    scales = Layout.BFLOAT16 if layout == Layout.STEPS4 else Layout.FLOAT32
    panels = _panels(matrix.shape, layout, group, 0, scales, isa)
    at, threads = (matrix.data_ptr(), panels.data.data_ptr()), torch.get_num_threads()
    loaded().baton_pack_floats(layout, *matrix.shape, group, _FLOATS[matrix.dtype], *at, threads)
    return panels


def packed_int8(
    values: Tensor, scales: Tensor, zeros: Tensor | None = None, group: int = 0, isa: Isa | None = None
) -> Panels:
    """(values - zeros) * scales: values (N, K) int8; scales and zeros are (N, K / group), rounded up; zeros, which
    become float16, None: all are 0. `group`, a multiple of 4, is 0 where each output has one scale."""
    _check(values.dtype == torch.int8, "int8 values")
    group = group or -(-values.shape[1] // 4) * 4
    return _packed_whole(values, scales, None if zeros is None else zeros.half(), Layout.INT8, group, isa)


def packed_int4(
    values: Tensor, scales: Tensor, zeros: Tensor | None, group: int, isa: Isa | None = None
) -> Panels:
    """(values - zeros) * scales: values (N, K) uint8 of 0..15; scales and zeros, uint8 or float16, are (N, K / group), rounded
    up; zeros None: all are 8."""
    _check(values.dtype == torch.uint8, "nibbles")
    _check(zeros is None or zeros.dtype in (torch.uint8, torch.float16), "zeros of a byte or of float16")
    return _packed_whole(values, scales, zeros, Layout.INT4, group, isa)


def _packed_whole(
    values: Tensor, scales: Tensor, zeros: Tensor | None, layout: Layout, group: int, isa: Isa | None
) -> Panels:
    values, scales = values.contiguous(), scales.contiguous()
    zeros = None if zeros is None else zeros.contiguous()
    _check(scales.dtype in _FLOATS, "scales of float32, bfloat16 or float16")
    kind = _FLOATS[scales.dtype]
    zero_bytes = 0 if zeros is None else zeros.dtype.itemsize
    panels = _panels(values.shape, layout, group, zero_bytes, kind, isa)
    groups = len(values), -(-values.shape[1] // group)
    _check(scales.shape == groups, f"a scale for each group, {groups}")
    _check(zeros is None or zeros.shape == groups, f"zeros for each scale, {groups}")
    pointers = [None if part is None else part.data_ptr() for part in (values, scales, zeros, panels.data)]
    loaded().baton_pack_whole(
        layout, *values.shape, group, zero_bytes, kind, *pointers, torch.get_num_threads()
    )
    return panels


def _panels(
    shape: torch.Size, layout: Layout, group: int, zero_bytes: int, scales: Layout, isa: Isa | None
) -> Panels:
    """Return panels without content."""
    outputs, inputs = shape
    unit = {Layout.INT8: 4, Layout.INT4: 8, Layout.STEPS4: 32}.get(layout)
    _check(unit is None or (group > 0 and group % unit == 0), f"groups of {unit}, not of {group}")
    _check(
        layout < Layout.INT8 or inputs <= MOST_INPUTS_OF_BYTES,
        f"at most {MOST_INPUTS_OF_BYTES} inputs, not {inputs}",
    )
    return Panels(
        data=large_pages(_packed_bytes(layout, outputs, inputs, group, zero_bytes, scales)),
        outputs=outputs,
        inputs=inputs,
        layout=layout,
        group=group,
        zero_bytes=zero_bytes,
        scales=scales,
        isa=isa if isa is not None else fastest_exact() if layout < Layout.INT8 else fastest_of_bytes(),
    )


@cache
def _packed_bytes(layout: int, outputs: int, inputs: int, group: int, zero_bytes: int, scales: int) -> int:
    return loaded().baton_packed_bytes(layout, outputs, inputs, group, zero_bytes, scales)


def _linear(
    x: Tensor,
    panels: Tensor,
    bias: Tensor | None,
    outputs: int,
    layout: int,
    group: int,
    zero_bytes: int,
    scales: int,
    isa: int,
) -> Tensor:
    """Pointers know no types and no bounds, so everything is checked here."""
    if x.dim() != 2 or x.dtype != torch.float32 or not x.is_contiguous():
        raise ValueError(
            f"baton::linear takes contiguous rows (T, K) of float32, not {tuple(x.shape)} of {x.dtype}"
        )
    rows, inputs = x.shape
    needed = _packed_bytes(layout, outputs, inputs, group, zero_bytes, scales)
    if panels.dtype != torch.uint8 or not panels.is_contiguous() or panels.numel() != needed:
        raise ValueError(f"baton::linear takes {needed} bytes of panels for such rows, not {panels.numel()}")
    if bias is not None and (
        bias.dtype != torch.float32 or bias.shape != (outputs,) or not bias.is_contiguous()
    ):
        raise ValueError(
            f"baton::linear takes a bias ({outputs},) of float32, not {tuple(bias.shape)} of {bias.dtype}"
        )
    out = result(rows, outputs)
    if rows:
        bias_at = None if bias is None else bias.data_ptr()
        shape = layout, outputs, inputs, group, zero_bytes, scales
        pointers = panels.data_ptr(), x.data_ptr(), rows, bias_at, out.data_ptr()
        loaded().baton_linear(isa, *shape, *pointers, torch.get_num_threads())
    return out


def _fake_linear(
    x: Tensor,
    panels: Tensor,
    bias: Tensor | None,
    outputs: int,
    layout: int,
    group: int,
    zero_bytes: int,
    scales: int,
    isa: int,
) -> Tensor:
    return x.new_empty(x.shape[0], outputs)


def _check(holds: bool, wanted: str) -> None:
    if not holds:
        raise ValueError(f"baton::linear takes {wanted}")


_torch_library.impl("linear", _linear, "CPU")
torch.library.register_fake("baton::linear", _fake_linear, lib=_torch_library)
