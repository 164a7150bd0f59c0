"""Native products against PyTorch's with the numbers that the panels mean, on every instruction set of this processor."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch
from gguf import GGMLQuantizationType, dequantize, quantize
from torch import Tensor
from torch.nn import functional as F

from core.errors import ConfigError
from kernels.cpu import library
from kernels.cpu.library import Isa, fastest_exact, fastest_of_bfloat16, instruction_sets
from kernels.cpu.linear import MOST_INPUTS_OF_BYTES, Layout, Panels, packed, packed_int4, packed_int8
from kernels.rounding import Rounding, as_floats, round_to, rounded
from tests.kernels.cpu.steps import in_steps

pytestmark = pytest.mark.skipif(not instruction_sets(), reason="there are no native kernels here")
SHAPES = [
    (1, 16, 8),
    (3, 7, 33),
    (8, 96, 64),
    (13, 33, 77),
    (1, 640, 512),
    (25, 511, 520),
    (97, 70, 130),
    (14, 40, 2051),
]
"""(rows, outputs, inputs)"""
FLOATS = {Layout.FLOAT32: torch.float32, Layout.BFLOAT16: torch.bfloat16, Layout.FLOAT16: torch.float16}
MADE = [layout for layout in Layout if layout != Layout.INT4]
"""What matrices of floats are packed to; the other comes from checkpoints."""
MOST = 2e-6
"""The bound of an error in float32, relative; what a format loses is no part of it."""


@pytest.fixture(params=list(Isa), ids=lambda isa: isa.name)
def isa(request: pytest.FixtureRequest) -> Isa:
    if request.param not in instruction_sets():
        pytest.skip(f"this processor has no {request.param.name}")
    return request.param


def random(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def integers(low: int, high: int, *shape: int) -> Tensor:
    return torch.randint(low, high, shape, generator=torch.Generator().manual_seed(sum(shape)))


def error(got: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None) -> float:
    """Relative, against the product in float64."""
    wanted = F.linear(x.double(), weight.double(), None if bias is None else bias.double())
    return float((got.double() - wanted).norm() / wanted.norm())


def as_multiplied(isa: Isa, layout: Layout, x: Tensor) -> Tensor:
    """What products with weights of that layout take the rows for."""
    rounds = isa.rounds_rows and layout == Layout.BFLOAT16
    return x.bfloat16().float() if rounds else x


def in_bytes(x: Tensor) -> Tensor:
    """What products with weights of few bits take the rows for."""
    return as_floats(round_to(x, Rounding(torch.int8)))


def in_four_bits(matrix: Tensor, group: int) -> Tensor:
    scales, steps, numbers = in_steps(matrix, group)
    return (numbers * steps * scales.float()).flatten(1)[:, : matrix.shape[1]]


@pytest.mark.parametrize(("count", "outputs", "inputs"), SHAPES)
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("layout", list(FLOATS), ids=lambda layout: layout.name)
def test_floats_are_multiplied_as_the_nearest_numbers_of_their_format(
    isa: Isa, count: int, outputs: int, inputs: int, has_bias: bool, layout: Layout
):
    weight, x, bias = random(outputs, inputs), random(count, inputs), random(outputs) if has_bias else None
    got = packed(weight, layout, isa=isa).product(x, bias)
    assert error(got, as_multiplied(isa, layout, x), weight.to(FLOATS[layout]).float(), bias) < MOST


@pytest.mark.parametrize("layout", MADE, ids=lambda layout: layout.name)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_matrix_of_16_bits_is_packed_as_the_same_numbers_in_32_are(layout: Layout, dtype: torch.dtype):
    matrix, group = random(70, 330).to(dtype), 32
    assert torch.equal(packed(matrix, layout, group).data, packed(matrix.float(), layout, group).data)


@pytest.mark.parametrize(("count", "outputs", "inputs"), SHAPES)
@pytest.mark.parametrize("has_bias", [False, True])
def test_8_bits_are_multiplied_by_rows_of_8_bits(
    isa: Isa, count: int, outputs: int, inputs: int, has_bias: bool
):
    weight, x, bias = random(outputs, inputs), random(count, inputs), random(outputs) if has_bias else None
    values, scales = rounded(weight, torch.int8)
    for made in (packed(weight, Layout.INT8, isa=isa), packed_int8(values, scales[:, None], isa=isa)):
        assert error(made.product(x, bias), in_bytes(x), values * scales[:, None], bias) < MOST


@pytest.mark.parametrize(("count", "outputs", "inputs"), SHAPES)
@pytest.mark.parametrize("group", [32, 128, 384])
def test_4_bits_are_multiplied_by_rows_of_8_bits(isa: Isa, count: int, outputs: int, inputs: int, group: int):
    weight, x = random(outputs, inputs), random(count, inputs)
    got = packed(weight, Layout.STEPS4, group, isa).product(x, None)
    assert error(got, in_bytes(x), in_four_bits(weight, group), None) < MOST


def test_4_bits_made_of_floats_lose_no_more_than_llama_cpp_s_which_are_larger(isa: Isa):
    matrix = random(96, 1024)
    made = packed(matrix, Layout.STEPS4, 128, isa)
    own = made.product(torch.eye(1024), None).T - matrix
    kind = GGMLQuantizationType.Q4_0
    theirs = quantize(matrix.numpy(), kind)
    assert made.data.nbytes < theirs.nbytes
    assert own.norm() < 1.01 * (torch.from_numpy(dequantize(theirs, kind)) - matrix).norm()


def zero_points(low: int, high: int, shape: tuple[int, int], dtype: torch.dtype | None) -> Tensor | None:
    """Zero points of float16 are no whole numbers."""
    if dtype is None:
        return None
    whole = integers(low, high, *shape)
    return (whole + random(*shape)).half() if dtype == torch.float16 else whole.to(dtype)


def spread(each: Tensor, group: int, inputs: int) -> Tensor:
    return each.float().repeat_interleave(group, 1)[:, :inputs]


@pytest.mark.parametrize(("count", "outputs", "inputs"), SHAPES)
@pytest.mark.parametrize("group", [16, 64])
@pytest.mark.parametrize("zero_dtype", [None, torch.uint8, torch.float16])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_4_bits_of_a_checkpoint_are_multiplied_as_they_are_stored(
    isa: Isa,
    count: int,
    outputs: int,
    inputs: int,
    group: int,
    zero_dtype: torch.dtype | None,
    dtype: torch.dtype,
):
    groups = -(-inputs // group)
    values = integers(0, 16, outputs, inputs).to(torch.uint8)
    zeros = zero_points(0, 17, (outputs, groups), zero_dtype)
    scales, x, bias = random(outputs, groups).to(dtype), random(count, inputs), random(outputs)
    numbers = values.float() - (8 if zeros is None else spread(zeros, group, inputs))
    got = packed_int4(values, scales, zeros, group, isa).product(x, bias)
    assert error(got, in_bytes(x), numbers * spread(scales, group, inputs), bias) < MOST


@pytest.mark.parametrize(("count", "outputs", "inputs"), SHAPES)
@pytest.mark.parametrize("group", [12, 64])
@pytest.mark.parametrize("zero_dtype", [None, torch.int16, torch.float16])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_8_bits_of_a_checkpoint_are_multiplied_as_they_are_stored(
    isa: Isa,
    count: int,
    outputs: int,
    inputs: int,
    group: int,
    zero_dtype: torch.dtype | None,
    dtype: torch.dtype,
):
    groups = -(-inputs // group)
    values = integers(-128, 128, outputs, inputs).to(torch.int8)
    zeros = zero_points(-128, 129, (outputs, groups), zero_dtype)
    scales, x, bias = random(outputs, groups).to(dtype), random(count, inputs), random(outputs)
    numbers = values.float() - (0 if zeros is None else spread(zeros, group, inputs))
    got = packed_int8(values, scales, zeros, group, isa).product(x, bias)
    assert error(got, in_bytes(x), numbers * spread(scales, group, inputs), bias) < MOST


def test_panels_are_no_larger_than_what_they_hold(isa: Isa):
    """4 bits and a scale of 16 for each 128, perhaps with a step of 8 for each 32; 8 bits and a scale for each 32; with zero points one
    or two bytes more for each scale."""
    values, ones = integers(0, 16, 96, 512).to(torch.uint8), torch.ones(96, 4).half()
    zeros, scales = torch.full((96, 4), 7, dtype=torch.uint8), torch.ones(96, 16).half()
    four, eight, numbers = packed_int4, packed_int8, 96 * 512
    assert four(values, ones, None, 128, isa).data.nbytes == numbers // 2 + 2 * 96 * 4
    assert (
        packed(values.float(), Layout.STEPS4, 128, isa).data.nbytes
        == numbers // 2 + numbers // 32 + 2 * 96 * 4
    )
    assert four(values, ones, zeros, 128, isa).data.nbytes == numbers // 2 + 3 * 96 * 4
    assert four(values, ones, zeros.half(), 128, isa).data.nbytes == numbers // 2 + 4 * 96 * 4
    assert eight(values.to(torch.int8), scales, None, 32, isa).data.nbytes == numbers + 2 * 96 * 16
    assert eight(values.to(torch.int8), scales, scales, 32, isa).data.nbytes == numbers + 4 * 96 * 16
    assert eight(values.to(torch.int8), torch.ones(96, 1), isa=isa).data.nbytes == numbers + 4 * 96


def test_the_largest_bytes_do_not_overflow(isa: Isa):
    """-128 is in nobody's rounding, and may be in a checkpoint."""
    inputs = 4096
    x = torch.full((5, inputs), 3.0)
    for value in (-128, 127):
        values = torch.full((40, inputs), value, dtype=torch.int8)
        got = packed_int8(values, torch.ones(40, 1), isa=isa).product(x, None)
        assert torch.equal(got, torch.full_like(got, 3.0 * value * inputs))
    for value in (-1.0, 1.0):
        weight = torch.full((40, inputs), value)
        got = packed(weight, Layout.STEPS4, 128, isa).product(x, None)
        assert error(got, x, in_four_bits(weight, 128), None) < MOST


@pytest.mark.parametrize("magnitude", [1e-37, 1e-30, 1e-18, 1e18, 1e30])
def test_rows_of_any_magnitude_are_rounded_alike(isa: Isa, magnitude: float):
    weight, x = random(40, 264), random(5, 264) * magnitude
    got = packed(weight, Layout.STEPS4, 64, isa).product(x, None)
    assert error(got, in_bytes(x), in_four_bits(weight, 64), None) < MOST


def test_numbers_half_way_between_two_bytes_go_to_the_even_one(isa: Isa):
    x = torch.cat((torch.tensor([254.0]), torch.arange(-126.0, 127.0) * 2 + 1, torch.zeros(2))).repeat(30, 1)
    got = packed(torch.eye(256), Layout.INT8, isa=isa).product(x, None)
    assert torch.allclose(got, (x / 2).round() * 2, rtol=1e-6, atol=0)


def test_rows_of_zeros_are_zeros(isa: Isa):
    for layout in MADE:
        assert not packed(random(40, 64), layout, 32, isa).product(torch.zeros(3, 64), None).any()


MAKE: dict[str, Callable[[Isa], Panels]] = {
    layout.name: lambda isa, layout=layout: packed(random(200, 300), layout, 64, isa) for layout in MADE
}
MAKE["INT8 in groups"] = lambda isa: packed_int8(
    integers(-128, 128, 200, 300).to(torch.int8), random(200, 5).half(), integers(-128, 128, 200, 5), 60, isa
)
MAKE["INT4"] = lambda isa: packed_int4(
    integers(0, 16, 200, 300).to(torch.uint8), random(200, 5).half(), None, 64, isa
)
MAKE["INT4 with zero points"] = lambda isa: packed_int4(
    integers(0, 16, 200, 300).to(torch.uint8),
    random(200, 5).half(),
    integers(0, 17, 200, 5).to(torch.uint8),
    64,
    isa,
)


MAKE["INT4 with zero points of float16"] = lambda isa: packed_int4(
    integers(0, 16, 200, 300).to(torch.uint8), random(200, 19).half(), random(200, 19).half(), 16, isa
)


@pytest.mark.parametrize("make", MAKE.values(), ids=MAKE)
def test_a_row_has_the_same_bits_in_every_batch(isa: Isa, make: Callable[[Isa], Panels]):
    weight, x, bias = make(isa), random(120, 300), random(200)
    whole = weight.product(x, bias)
    for count in (1, 2, 5, 11, 12, 13, 29):
        parts = [weight.product(part, bias) for part in x.split(count)]
        assert torch.equal(torch.cat(parts), whole)


@pytest.mark.parametrize("make", MAKE.values(), ids=MAKE)
def test_threads_and_callers_change_nothing(isa: Isa, make: Callable[[Isa], Panels]):
    weight, x = make(isa), random(50, 300)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        alone = weight.product(x, None)
        torch.set_num_threads(3)
        with ThreadPoolExecutor(4) as callers:
            found = list(callers.map(lambda _: weight.product(x, None), range(40)))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(one, alone) for one in found)


def test_rows_of_16_bits_have_products_of_16_bits(isa: Isa):
    weight, x = random(40, 64).bfloat16().float(), random(3, 64).bfloat16()
    got = packed(weight, Layout.BFLOAT16, isa=isa).product(x, random(40).bfloat16())
    assert got.dtype == torch.bfloat16
    assert torch.equal(got, F.linear(x.double(), weight.double(), random(40).bfloat16().double()).bfloat16())


def test_rows_are_rounded_to_bfloat16_for_nobody_who_does_not_ask():
    assert not packed(random(40, 64), Layout.BFLOAT16).isa.rounds_rows
    assert fastest_of_bfloat16() in (fastest_exact(), Isa.AVX512_BF16)


def test_what_kernels_would_read_wrongly_is_refused():
    panels, x = torch.zeros(32 * 64 * 4, dtype=torch.uint8), torch.zeros(2, 64)
    multiply = torch.ops.baton.linear
    about = 32, int(Layout.FLOAT32), 0, False, 0, int(Isa.AVX2)
    assert multiply(x, panels, None, *about).shape == (2, 32)
    for wrong in (x.double(), x[0], x.T, torch.zeros(2, 65)):
        with pytest.raises(ValueError, match="takes"):
            multiply(wrong, panels, None, *about)
    for bias in (torch.zeros(31), torch.zeros(32).double(), torch.zeros(64)[::2]):
        with pytest.raises(ValueError, match="a bias"):
            multiply(x, panels, bias, *about)
    with pytest.raises(ValueError, match="groups of 8"):
        packed_int4(torch.zeros(8, 64, dtype=torch.uint8), torch.ones(8, 6), None, 12)
    with pytest.raises(ValueError, match="groups of 32"):
        packed(random(8, 64), Layout.STEPS4, 48)
    with pytest.raises(ValueError, match="packed_int4"):
        packed(random(8, 64), Layout.INT4, 32)
    with pytest.raises(ValueError, match="inputs"):
        packed(torch.zeros(1, MOST_INPUTS_OF_BYTES + 1), Layout.INT8)


def test_the_operator_can_be_traced():
    panels, x = torch.zeros(32 * 64 * 4, dtype=torch.uint8), torch.randn(2, 64)
    about = x, panels, torch.zeros(32), 32, int(Layout.FLOAT32), 0, False, 0, int(Isa.AVX2)
    torch.library.opcheck(
        torch.ops.baton.linear.default, about, test_utils=("test_schema", "test_faketensor")
    )


def test_no_instruction_set_behind_the_named_one_is_chosen(monkeypatch: pytest.MonkeyPatch):
    for chosen in (fastest_exact, fastest_of_bfloat16):
        monkeypatch.setattr(library, chosen.__name__, chosen.__wrapped__)
    for name, last in (("avx2", Isa.AVX2), ("avx512", Isa.AVX512), ("AVX512_BF16", Isa.AVX512_BF16)):
        monkeypatch.setenv("BATON_MAX_CPU_ISA", name)
        assert library.fastest_exact() == max(
            isa for isa in instruction_sets() if isa.level <= min(last, Isa.AVX512)
        )
        assert (library.fastest_of_bfloat16() or Isa.AVX2).level <= last
    monkeypatch.setenv("BATON_MAX_CPU_ISA", "neon")
    assert library.fastest_exact() in (Isa.AVX2, Isa.NEON)
    monkeypatch.setenv("BATON_MAX_CPU_ISA", "sse")
    with pytest.raises(
        ConfigError, match="BATON_MAX_CPU_ISA is sse: it may be one of avx2, avx512, avx512_bf16, amx, neon"
    ):
        library.fastest_exact()


@pytest.mark.parametrize("name", ["", *(isa.name for isa in Isa)])
def test_arm_chooses_its_own_kernels_whatever_is_named(monkeypatch: pytest.MonkeyPatch, name: str):
    """NEON rounds no row, and every name allows at least AVX2, which has the same bits."""
    monkeypatch.setattr(library, "instruction_sets", lambda: [Isa.NEON])
    monkeypatch.setenv("BATON_MAX_CPU_ISA", name)
    monkeypatch.setattr(library, "fastest_exact", fastest_exact.__wrapped__)
    for choose in (fastest_exact, library.fastest_of_bytes, fastest_of_bfloat16):
        assert getattr(choose, "__wrapped__", choose)() == Isa.NEON
    assert not Isa.NEON.rounds_rows


@pytest.mark.parametrize(("machine", "lacking"), [("x86_64", "AVX2, FMA or F16C"), ("aarch64", "ARMv8.2")])
def test_a_processor_without_the_instructions_is_told_which(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, machine: str, lacking: str
):
    monkeypatch.setattr(library, "load", lambda _: SimpleNamespace(baton_has=lambda _: 0))
    monkeypatch.setattr(library, "this_machine", lambda: machine)
    assert library.native.__wrapped__() is None
    assert "this processor lacks" in caplog.text
    assert lacking in caplog.text
