"""Products with matrices in panels (`src/layout.h`), as the torch operator `baton::linear`.

float32, bfloat16 and float16 are added up in float32. With int8 and int4 each row of inputs is rounded to 8 bits as it comes, by
its largest magnitude; products are exact within a group of inputs that share a scale. A row's result has the same bits whatever
other rows come with it, and however many threads compute it."""

from collections.abc import Callable
from enum import IntEnum
from functools import cache, partial
from typing import Final

import torch
from torch import Tensor

from kernels.cpu.library import Isa, instruction_sets, native
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


_torch_library = torch.library.Library("baton", "DEF")
_torch_library.define(
    "linear(Tensor x, Tensor panels, Tensor? bias, int outputs, int layout, int group, bool has_zeros, int isa) -> Tensor"
)


def packed(matrix: Tensor, layout: Layout, group: int = 0, isa: Isa | None = None) -> Prepacked:
    """matrix (N, K) to the nearest numbers of `layout`; `group`: inputs that share a scale with INT4, a multiple of 8. `isa`: the
    instruction set that multiplies; None: the fastest. Needs `native`."""
    matrix = matrix.float().contiguous()
    return _in_panels(matrix.shape, layout, group, False, isa, partial(_pack_floats, layout, matrix, group))


def packed_int8(values: Tensor, scales: Tensor, isa: Isa | None = None) -> Prepacked:
    """values (N, K) int8, scales (N,)."""
    values, scales = values.contiguous(), scales.float().contiguous()
    _check(
        values.dtype == torch.int8 and scales.shape == values.shape[:1],
        "int8 values, and a scale for each row",
    )
    return _in_panels(values.shape, Layout.INT8, 0, False, isa, partial(_pack_int8, values, scales))


def packed_int4(
    values: Tensor, scales: Tensor, zeros: Tensor | None, group: int, isa: Isa | None = None
) -> Prepacked:
    """(values - zeros) * scales: values (N, K) uint8 of 0..15; scales, which become float16, and zeros, uint8, are
    (N, K / group), rounded up; zeros None: all are 8."""
    groups = -(-values.shape[1] // group)
    values, scales = values.contiguous(), scales.half().contiguous()
    zeros = None if zeros is None else zeros.contiguous()
    _check(
        values.dtype == torch.uint8 and scales.shape == (len(values), groups),
        "nibbles, and a scale for each group",
    )
    _check(
        zeros is None or (zeros.dtype == torch.uint8 and zeros.shape == scales.shape), "zeros for each scale"
    )
    write = partial(_pack_int4, values, scales, zeros, group)
    return _in_panels(values.shape, Layout.INT4, group, zeros is not None, isa, write)


def _in_panels(
    shape: torch.Size,
    layout: Layout,
    group: int,
    has_zeros: bool,
    isa: Isa | None,
    write: Callable[[Tensor], None],
) -> Prepacked:
    outputs, inputs = shape
    _check(layout != Layout.INT4 or (group > 0 and group % 8 == 0), f"groups of 8, not of {group}")
    _check(
        layout < Layout.INT8 or inputs <= MOST_INPUTS_OF_BYTES,
        f"at most {MOST_INPUTS_OF_BYTES} inputs, not {inputs}",
    )
    panels = torch.empty(_packed_bytes(layout, outputs, inputs, group, has_zeros), dtype=torch.uint8)
    write(panels)
    about = outputs, int(layout), group, has_zeros, int(instruction_sets()[-1] if isa is None else isa)
    multiply = torch.ops.baton.linear.default

    def product(x: Tensor, bias: Tensor | None) -> Tensor:
        own = None if bias is None else bias.float().contiguous()
        return multiply(x.float().contiguous(), panels, own, *about).to(x.dtype)

    return Prepacked((outputs, inputs), product)


def _library():
    library = native()
    assert library is not None, "callers ask for native kernels where there are some"
    return library


@cache
def _packed_bytes(layout: int, outputs: int, inputs: int, group: int, has_zeros: bool) -> int:
    return _library().baton_packed_bytes(layout, outputs, inputs, group, has_zeros)


def _pack_floats(layout: Layout, matrix: Tensor, group: int, panels: Tensor) -> None:
    shape, threads = matrix.shape, torch.get_num_threads()
    _library().baton_pack_floats(layout, *shape, group, matrix.data_ptr(), panels.data_ptr(), threads)


def _pack_int8(values: Tensor, scales: Tensor, panels: Tensor) -> None:
    pointers = [each.data_ptr() for each in (values, scales, panels)]
    _library().baton_pack_int8(*values.shape, *pointers, torch.get_num_threads())


def _pack_int4(values: Tensor, scales: Tensor, zeros: Tensor | None, group: int, panels: Tensor) -> None:
    zeros_at = None if zeros is None else zeros.data_ptr()
    pointers = values.data_ptr(), scales.data_ptr(), zeros_at, panels.data_ptr()
    _library().baton_pack_int4(*values.shape, group, *pointers, torch.get_num_threads())


def _linear(
    x: Tensor,
    panels: Tensor,
    bias: Tensor | None,
    outputs: int,
    layout: int,
    group: int,
    has_zeros: bool,
    isa: int,
) -> Tensor:
    """Pointers know no types and no bounds, so everything is checked here."""
    if x.dim() != 2 or x.dtype != torch.float32 or not x.is_contiguous():
        raise ValueError(
            f"baton::linear takes contiguous rows (T, K) of float32, not {tuple(x.shape)} of {x.dtype}"
        )
    rows, inputs = x.shape
    needed = _packed_bytes(layout, outputs, inputs, group, has_zeros)
    if panels.dtype != torch.uint8 or not panels.is_contiguous() or panels.numel() != needed:
        raise ValueError(f"baton::linear takes {needed} bytes of panels for such rows, not {panels.numel()}")
    if bias is not None and (
        bias.dtype != torch.float32 or bias.shape != (outputs,) or not bias.is_contiguous()
    ):
        raise ValueError(
            f"baton::linear takes a bias ({outputs},) of float32, not {tuple(bias.shape)} of {bias.dtype}"
        )
    out = torch.empty(rows, outputs)
    if rows:
        bias_at = None if bias is None else bias.data_ptr()
        shape = layout, outputs, inputs, group, has_zeros
        pointers = panels.data_ptr(), x.data_ptr(), rows, bias_at, out.data_ptr()
        _library().baton_linear(isa, *shape, *pointers, torch.get_num_threads())
    return out


def _fake_linear(
    x: Tensor,
    panels: Tensor,
    bias: Tensor | None,
    outputs: int,
    layout: int,
    group: int,
    has_zeros: bool,
    isa: int,
) -> Tensor:
    return x.new_empty(x.shape[0], outputs)


def _check(holds: bool, wanted: str) -> None:
    if not holds:
        raise ValueError(f"baton::linear takes {wanted}")


_torch_library.impl("linear", _linear, "CPU")
torch.library.register_fake("baton::linear", _fake_linear, lib=_torch_library)
