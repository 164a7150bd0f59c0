"""Panels hold what `kernels/cpu/src/layout.h` says, byte for byte: against the layout written out in PyTorch."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from kernels.cpu.library import instruction_sets
from kernels.cpu.linear import Layout, Panels, packed, packed_int4, packed_int8
from kernels.cpu.stored import stored_panels
from kernels.packed import Int8Groups, as_float
from kernels.packing import from_nibbles
from tests.kernels.cpu.steps import in_steps

pytestmark = pytest.mark.skipif(not instruction_sets(), reason="there are no native kernels here")
FLOATS = {
    Layout.FLOAT32: (torch.float32, 1),
    Layout.BFLOAT16: (torch.bfloat16, 2),
    Layout.FLOAT16: (torch.float16, 1),
}
"""Dtypes, and how many inputs of an output lie side by side."""
SHAPES = [(1, 3), (33, 130), (70, 515)]


def random(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def integers(low: int, high: int, *shape: int) -> Tensor:
    return torch.randint(low, high, shape, generator=torch.Generator().manual_seed(sum(shape)))


def laid_out(numbers: Tensor, side: int) -> Tensor:
    """(N, K) -> (panels, bytes of one): `side` inputs of each of 32 outputs, and zeros behind the last ones."""
    filled = F.pad(numbers, (0, -numbers.shape[1] % side, 0, -len(numbers) % 32))
    panels = filled.reshape(-1, 32, filled.shape[1] // side, side).transpose(1, 2).contiguous()
    return panels.view(torch.uint8).flatten(1)


def halves_laid_out(values: Tensor) -> Tensor:
    eight = laid_out(values, 8).reshape(-1, 8)
    halves = eight[:, :4] | eight[:, 4:] << 4
    return halves.reshape(-(-len(values) // 32), -1)


def by_panel(panels: Panels) -> Tensor:
    return panels.data.reshape(-(-panels.outputs // 32), -1)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("layout", FLOATS, ids=lambda layout: layout.name)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_floats_lie_as_the_nearest_numbers(shape: tuple[int, int], layout: Layout, dtype: torch.dtype):
    matrix, (own, side) = random(*shape).to(dtype), FLOATS[layout]
    matrix[0, :3] = torch.tensor([torch.inf, -0.0, 1e-6])
    assert torch.equal(by_panel(packed(matrix, layout)), laid_out(matrix.to(own), side))


def test_what_is_no_number_stays_none():
    matrix = torch.full((2, 4), torch.nan)
    for layout, (own, _) in FLOATS.items():
        found = packed(matrix, layout).data.view(own).reshape(4 // FLOATS[layout][1], 32, -1)
        assert found[:, :2].isnan().all()


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("group", [12, 64, 640])
def test_8_bits_lie_as_they_were_stored(shape: tuple[int, int], group: int):
    groups = -(-shape[1] // group)
    values = integers(-128, 128, *shape).to(torch.int8)
    scales, zeros = random(shape[0], groups).half(), integers(-128, 129, shape[0], groups)
    numbers = laid_out((values.to(torch.int16) + 128).to(torch.uint8), 4)
    found = by_panel(packed_int8(values, scales, zeros, group))
    at = numbers.shape[1]
    assert torch.equal(found[:, :at], numbers)
    for column in (scales, zeros.half()):
        assert torch.equal(found[:, at : at + 64 * groups], laid_out(column, 1))
        at += 64 * groups


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("group", [8, 128, 640])
@pytest.mark.parametrize("zero_dtype", [torch.uint8, torch.float16])
def test_4_bits_lie_as_they_were_stored(shape: tuple[int, int], group: int, zero_dtype: torch.dtype):
    groups = -(-shape[1] // group)
    values = integers(0, 16, *shape).to(torch.uint8)
    scales, zeros = random(shape[0], groups), integers(0, 17, shape[0], groups).to(zero_dtype)
    found = by_panel(packed_int4(values, scales, zeros, group))
    numbers = halves_laid_out(values)
    at = numbers.shape[1]
    assert torch.equal(found[:, :at], numbers)
    assert torch.equal(found[:, at : at + 128 * groups], laid_out(scales, 1))
    at += 128 * groups
    wanted = laid_out(zeros, 1)
    assert torch.equal(found[:, at : at + wanted.shape[1]], wanted)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_floats_are_rounded_to_8_bits_by_their_rows_largest(shape: tuple[int, int], dtype: torch.dtype):
    matrix = random(*shape).to(dtype)
    matrix[-1] = 0
    most = matrix.float().abs().amax(1, keepdim=True)
    scales = torch.where(most > 0, most / 127, 1.0)
    values = (matrix.float() / scales).round().to(torch.int8)
    assert torch.equal(packed(matrix, Layout.INT8).data, packed_int8(values, scales).data)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("group", [32, 96, 256, 640])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_floats_are_rounded_to_4_bits_by_whole_steps_of_their_spans_scale(
    shape: tuple[int, int], group: int, dtype: torch.dtype
):
    matrix = random(*shape).to(dtype)
    matrix[-1] = 0
    scales, steps, numbers = in_steps(matrix.float(), group)
    left = by_panel(packed(matrix, Layout.STEPS4, group))
    for span in range(scales.shape[1]):
        inputs = min(group, -(-shape[1] // 32) * 32 - span * group)
        halves = (numbers[:, span].flatten(1) + 8).to(torch.uint8)[:, : min(inputs, shape[1] - span * group)]
        table = laid_out(steps[:, span, :, 0].to(torch.int8), 1)
        table = F.pad(table, (0, -table.shape[1] % 64))  # numbers begin on a line of the cache
        wanted = torch.cat((laid_out(scales[:, span, :, 0], 1), table, halves_laid_out(halves)), 1)
        assert torch.equal(left[:, : wanted.shape[1]], wanted)
        left = left[:, 64 + table.shape[1] + 16 * inputs :]
    assert not left.numel()


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("layout", FLOATS, ids=lambda layout: layout.name)
def test_rows_of_floats_are_read_back_as_they_were_packed(shape: tuple[int, int], layout: Layout):
    matrix, numbers = random(*shape).to(FLOATS[layout][0]), integers(0, shape[0], 9)
    assert torch.equal(packed(matrix, layout).rows(numbers), matrix.float()[numbers])


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("group", [12, 64, 640])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("zero_dtype", [None, torch.int16, torch.float16])
def test_rows_of_8_bits_are_read_back_as_they_were_stored(
    shape: tuple[int, int], group: int, dtype: torch.dtype, zero_dtype: torch.dtype | None
):
    values = integers(-128, 128, *shape).to(torch.int8)
    groups = shape[0], -(-shape[1] // group)
    zeros = None if zero_dtype is None else (random(*groups) * 9).to(zero_dtype)
    stored = Int8Groups(values=values, scales=random(*groups).to(dtype), zeros=zeros, group=group)
    panels = stored_panels(stored)
    assert panels is not None
    numbers = integers(0, shape[0], 9)
    assert torch.equal(panels.rows(numbers), as_float(stored, torch.float32)[numbers])


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("group", [16, 128])
@pytest.mark.parametrize("zero_dtype", [None, torch.uint8, torch.float16])
def test_rows_of_4_bits_are_read_back_as_they_were_stored(
    shape: tuple[int, int], group: int, zero_dtype: torch.dtype | None
):
    nibbles = integers(0, 16, shape[1], shape[0]).to(torch.uint8)
    scales = random(-(-shape[1] // group), shape[0]).half()
    zeros = (random(*scales.shape).abs() * 2 + 9).to(zero_dtype or torch.uint8)
    stored = from_nibbles(nibbles, scales, group, None if zero_dtype is None else zeros)
    if zero_dtype == torch.uint8:
        stored = replace(stored, has_whole_zeros=True)
    panels = stored_panels(stored)
    assert panels is not None
    assert panels.zero_bytes == (0 if zero_dtype is None else zero_dtype.itemsize)
    numbers = integers(0, shape[0], 9)
    assert torch.equal(panels.rows(numbers), as_float(stored, torch.float32)[numbers])


def test_rows_of_steps_are_not_read_back():
    panels = packed(random(64, 64), Layout.STEPS4, 32)
    assert not panels.has_rows
    with pytest.raises(ValueError, match="rows"):
        panels.rows(integers(0, 64, 3))


@pytest.mark.parametrize("number", [-1, 40])
def test_a_row_that_the_matrix_does_not_have_is_refused(number: int):
    with pytest.raises(IndexError, match=f"row {number} of a matrix of 40"):
        packed(random(40, 64), Layout.BFLOAT16).rows(torch.tensor([3, number, 5]))
