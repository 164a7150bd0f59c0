"""Matrices that are laid out for a CPU once give the products of the matrices that they were made of."""

import pytest
import torch
from torch.nn import functional as F

from kernels.cpu import prepacked
from kernels.cpu.library import Isa, instruction_sets, native
from kernels.cpu.prepacked import WeightFormat, in_pieces, linear, pack, prepacked_ops
from kernels.packed import FourBit, Prepacked
from kernels.rounding import Activations

pytestmark = pytest.mark.skipif(native() is None, reason="there are no native kernels here")
SHAPES = [(1, 16, 8), (3, 7, 33), (8, 96, 64), (65, 200, 129), (1, 640, 512), (70, 511, 520)]
"""(rows, outputs, inputs)"""


def matrix(outputs: int, inputs: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return (0.05 * torch.randn(outputs, inputs, generator=torch.Generator().manual_seed(inputs))).to(dtype)


def rows(count: int, inputs: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(count, inputs, generator=torch.Generator().manual_seed(count)).to(dtype)


def error(got: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> float:
    """Relative, against the product in float64."""
    wanted = F.linear(x.double(), weight.double(), None if bias is None else bias.double())
    return float((got.double() - wanted).norm() / wanted.norm())


@pytest.mark.parametrize(("count", "outputs", "inputs"), SHAPES)
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize(
    ("weights", "most"), [("full", 1e-6), ("half", 1e-6), ("int8", 0.02), ("int4", 0.12)]
)
def test_a_product_is_that_of_the_matrix(
    count: int, outputs: int, inputs: int, has_bias: bool, weights: WeightFormat, most: float
):
    weight, x = matrix(outputs, inputs, torch.bfloat16).float(), rows(count, inputs)
    bias = rows(1, outputs)[0] if has_bias else None
    packed = pack(weights, weight, torch.float32)
    assert packed.shape == (outputs, inputs)
    got = linear(x, packed, bias)
    assert got.dtype == torch.float32
    assert error(got, x, weight, bias) < most


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_checkpoints_of_16_bits_lose_nothing(dtype: torch.dtype):
    """Numbers of each that the other one lacks."""
    weight, x = matrix(96, 64, dtype), rows(5, 64)
    weight[0, 0] = 1e30 if dtype == torch.bfloat16 else 1 + 2**-10
    assert error(linear(x, pack("half", weight.float(), torch.float32), None), x, weight, None) < 1e-6


@pytest.mark.parametrize("has_it", [True, False])
@pytest.mark.parametrize("has_native", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_products_of_16_bits_need_no_processor_that_has_them(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, has_it: bool, has_native: bool
):
    if has_it and dtype == torch.bfloat16 and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        pytest.skip("oneDNN multiplies no bfloat16 with AVX2 alone")
    monkeypatch.setattr(prepacked, "has_bfloat16", lambda: has_it)
    if not has_native:
        monkeypatch.setattr(prepacked, "native", lambda: None)
    weight, x = matrix(600, 512, dtype), rows(9, 512, dtype)
    got = linear(x, pack("full", weight, dtype), None)
    assert got.dtype == dtype
    assert error(got, x, weight, None) < 0.005


def test_without_native_kernels_float32_has_the_same_product(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(prepacked, "native", lambda: None)
    weight, x, bias = matrix(600, 512), rows(9, 512), rows(1, 600)[0]
    assert error(linear(x, pack("full", weight, torch.float32), bias), x, weight, bias) < 1e-6


@pytest.mark.parametrize("isa", instruction_sets(), ids=lambda isa: isa.name)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_rows_are_rounded_for_matrices_of_bfloat16_where_their_products_are_quicker(
    monkeypatch: pytest.MonkeyPatch, isa: Isa, dtype: torch.dtype
):
    monkeypatch.setattr(prepacked, "fastest_of_bfloat16", lambda: isa)
    ops, weight, x = prepacked_ops("half"), matrix(96, 64, dtype), rows(40, 64)
    is_rounded = isa.rounds_rows and dtype == torch.bfloat16
    taken_for = x.bfloat16().float() if is_rounded else x
    for count in (1, 2, 40):
        got = ops.linear(x[:count], ops.pack(weight, torch.float32), None)
        assert got.dtype == torch.float32
        assert error(got, taken_for[:count], weight, None) < 2e-6


def test_what_16_bits_cannot_hold_stays_wider():
    weight, x = matrix(16, 32), rows(2, 32)
    got = linear(x, pack("half", weight, torch.float32), None)
    assert error(got, x, weight, None) < 1e-6


@pytest.mark.parametrize("weights", ["full", "half", "int8", "int4"])
def test_a_step_without_rows_has_a_product_without_rows(weights: WeightFormat):
    assert linear(torch.empty(0, 64), pack(weights, matrix(96, 64), torch.float32), None).shape == (0, 96)


def test_weights_that_a_checkpoint_stores_in_four_bits_are_packed_as_what_they_mean():
    stored = FourBit(
        words=torch.randint(-(2**15), 2**15, (1, 2048, 32), dtype=torch.int16),
        scales=torch.stack((torch.rand(1, 2048) / 8, torch.full((1, 2048), 8.0)), -1),
        group=128,
        inputs=128,
    )
    packed, x = pack("full", stored, torch.float32), rows(4, 128)
    assert isinstance(packed, Prepacked)
    assert torch.allclose(linear(x, packed, None), linear(x, stored, None), atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("count", [0, 5, 191, 192, 200, 700])
def test_pieces_have_the_bits_of_the_whole(count: int, dtype: torch.dtype):
    ups, down = (pack("half", matrix(96, 96, torch.bfloat16), dtype) for _ in range(2))
    x, sizes = rows(count, 96, dtype), list[int]()

    def multiply(part: Activations) -> torch.Tensor:
        sizes.append(len(part))
        return linear(linear(part, ups, None), down, None)

    got = in_pieces(multiply, x)
    assert sum(sizes) == count
    assert max(sizes) < 192
    assert got.dtype == dtype
    assert torch.equal(got, multiply(x))
