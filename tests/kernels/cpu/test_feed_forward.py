"""A gated block in one native call has the bits of its operations one by one, on every instruction set of this processor."""

from collections.abc import Iterator
from typing import Any, get_args

import pytest
import torch
from torch import Tensor

from kernels.cpu import library
from kernels.cpu.dense_layers import GATES
from kernels.cpu.elementwise import gate_with
from kernels.cpu.feed_forward import native_feed_forward
from kernels.cpu.linear import Layout
from kernels.cpu.prepacked import feed_forward, in_panels, linear
from kernels.ops import Gate, GatedBlock
from kernels.packed import Prepacked
from kernels.torch import reference
from tests.kernels.cpu.test_dense_layers import panels_of

pytestmark = pytest.mark.skipif(not library.instruction_sets(), reason="there are no native kernels here")
HIDDEN = 72
ROWS = (1, 2, 13, 95, 96, 97, 300)


@pytest.fixture(params=list(library.Isa), ids=lambda isa: isa.name)
def isa(request: pytest.FixtureRequest) -> library.Isa:
    if request.param not in library.instruction_sets():
        pytest.skip(f"this processor has no {request.param.name}")
    return request.param


@pytest.fixture(params=[1, 3])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def never(*given: object) -> Any:
    raise AssertionError("the native kernel computes this")


def block(layout: Layout, isa: library.Isa, inner: int, gate: Gate = "silu") -> GatedBlock:
    torch.manual_seed(inner)

    def matrix(outputs: int, inputs: int) -> Prepacked:
        return in_panels(panels_of(layout, torch.randn(outputs, inputs) / inputs**0.5, isa))

    bias = torch.randn(2 * inner) if gate == "silu" else None
    return GatedBlock(
        gate_up=matrix(2 * inner, HIDDEN), gate_up_bias=bias, gate=gate, down=matrix(HIDDEN, inner)
    )


def one_by_one(given: GatedBlock, x: Tensor, isa: library.Isa) -> Tensor:
    assert given.gate is not None
    gated = gate_with(isa, GATES[given.gate], never)(linear(x, given.gate_up, given.gate_up_bias))
    return linear(gated, given.down, None)


@pytest.mark.parametrize("layout", list(Layout), ids=lambda layout: layout.name)
@pytest.mark.parametrize("inner", [5, 64, 250, 1056])
def test_a_block_has_the_bits_of_its_operations(
    isa: library.Isa, layout: Layout, inner: int, threads: int
) -> None:
    """Ups begin with a panel where `inner` is a multiple of 32."""
    for gate in get_args(Gate):
        given = block(layout, isa, inner, gate)
        made = native_feed_forward(given, never, isa)
        assert made is not None
        for count in ROWS:
            x = torch.randn(count, HIDDEN)
            assert torch.equal(made(x), one_by_one(given, x, isa)), (gate, count)


@pytest.mark.parametrize("gate", get_args(Gate))
def test_a_block_is_what_pytorch_computes(isa: library.Isa, gate: Gate) -> None:
    given = block(Layout.FLOAT32, isa, 250, gate)
    assert isinstance(given.gate_up, Prepacked)
    assert isinstance(given.down, Prepacked)
    assert given.gate_up.rows is not None
    assert given.down.rows is not None
    ups, down = (
        each(torch.arange(n)).double() for each, n in ((given.gate_up.rows, 500), (given.down.rows, HIDDEN))
    )
    x = torch.randn(40, HIDDEN)
    bias = None if given.gate_up_bias is None else given.gate_up_bias.double()
    activate = reference.silu_mul if gate == "silu" else reference.gelu_tanh_mul
    wanted = activate(torch.nn.functional.linear(x.double(), ups, bias)) @ down.T
    made = native_feed_forward(given, never, isa)
    assert made is not None
    torch.testing.assert_close(made(x).double(), wanted, atol=1e-5, rtol=1e-5)


def test_what_the_kernel_does_not_take_goes_the_other_way(isa: library.Isa) -> None:
    given = block(Layout.BFLOAT16, isa, 64)
    plain = GatedBlock(gate_up=torch.randn(128, HIDDEN), gate_up_bias=None, gate="silu", down=given.down)
    other = GatedBlock(gate_up=given.gate_up, gate_up_bias=None, gate=None, down=given.down)
    for each in (plain, other):
        assert native_feed_forward(each, never, isa) is None

    def in_order(x: Any) -> Tensor:
        return x + 1

    made = feed_forward(given, in_order)
    for x in (torch.zeros(3, HIDDEN, dtype=torch.bfloat16), torch.zeros(0, HIDDEN)):
        assert torch.equal(made(x), x + 1)
    assert torch.equal(feed_forward(other, in_order)(torch.zeros(300, HIDDEN)), torch.ones(300, HIDDEN))


def test_matrices_and_rows_that_do_not_fit_are_not_given_to_pointers(isa: library.Isa) -> None:
    given = block(Layout.FLOAT32, isa, 64)
    wrong = GatedBlock(gate_up=given.down, gate_up_bias=None, gate="silu", down=given.down)
    with pytest.raises(ValueError, match="gates and ups for 64 inputs, not 72"):
        native_feed_forward(wrong, never, isa)
    made = native_feed_forward(given, never, isa)
    assert made is not None
    with pytest.raises(ValueError, match=r"rows \(T, 72\)"):
        made(torch.zeros(3, 71))
