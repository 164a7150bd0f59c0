"""Native norms, gates and rotations against PyTorch's in float64, on every instruction set of this processor."""

from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from kernels.cpu import library
from kernels.cpu.elementwise import add_norm_with, gate_with, norm_with, turn_with, with_native_rows
from kernels.ops import AttentionMeta, HeadNorms, KVLayer, ScaledKV
from kernels.torch import reference
from tests.kernels.paged_step import CPU

pytestmark = pytest.mark.skipif(not library.instruction_sets(), reason="there are no native kernels here")
SIZES = [1, 7, 16, 64, 200, 896]
TURNED = reference.reference_ops().rope_write_kv


@pytest.fixture(params=[library.Isa.AVX2, library.Isa.AVX512], ids=lambda isa: isa.name)
def isa(request: pytest.FixtureRequest) -> library.Isa:
    if request.param not in library.instruction_sets():
        pytest.skip(f"this processor has no {request.param.name}")
    return request.param


def never(*given: object) -> Any:
    raise AssertionError("the native kernel computes this")


def close(got: torch.Tensor, want: torch.Tensor) -> None:
    torch.testing.assert_close(got.double(), want, atol=2e-6, rtol=2e-6)


@pytest.mark.parametrize("size", SIZES)
def test_a_norm_is_that_of_the_sum(isa: library.Isa, size: int) -> None:
    torch.manual_seed(size)
    x, residual, weight = torch.randn(5, size) * 3, torch.randn(5, size), torch.randn(size)
    total, normed = add_norm_with(isa, never)(x, residual, weight, 1e-5)
    assert torch.equal(total, residual + x)
    close(normed, F.rms_norm(total.double(), (size,), weight.double(), 1e-5))
    heads = x.view(5, 1, size)
    assert torch.equal(norm_with(isa, never)(total.view_as(heads), weight, 1e-5).view(5, size), normed)


@pytest.mark.parametrize("size", SIZES)
def test_gates_hold_over_all_magnitudes(isa: library.Isa, size: int) -> None:
    torch.manual_seed(size)
    x = torch.randn(9, 2 * size) * torch.logspace(-3, 3, 9)[:, None]
    x[0, 0], x[1, 0], x[2, 0] = torch.inf, torch.nan, 0.0
    gate, up = x.double().chunk(2, -1)
    for number, activated in enumerate((F.silu(gate), F.gelu(gate, approximate="tanh"))):
        got = gate_with(isa, number, never)(x)
        torch.testing.assert_close(got.double(), activated * up, atol=2e-6, rtol=2e-6, equal_nan=True)


def rotation(rows: int, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    angles = torch.rand(rows, size // 2).mul(7).repeat(1, 2)
    return angles.cos(), angles.sin()


def meta_of(slots: list[int]) -> AttentionMeta:
    return AttentionMeta.build(
        [len(slots)], [len(slots)], [np.arange(9, dtype=np.int64)], np.array(slots, np.int64), CPU
    )


@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize(("heads", "kv_heads", "size"), [(6, 2, 16), (3, 3, 10), (4, 1, 80)])
def test_queries_are_turned_and_keys_and_values_lie_in_their_slots(
    isa: library.Isa, heads: int, kv_heads: int, size: int, normed: bool
) -> None:
    torch.manual_seed(size)
    slots = [17, 3, 4, 30]
    qkv = torch.randn(len(slots), (heads + 2 * kv_heads) * size)
    norms: HeadNorms | None = (torch.rand(size), torch.rand(size), 1e-6) if normed else None
    wide: Any = None if norms is None else (norms[0].double(), norms[1].double(), 1e-6)
    cos, sin = rotation(len(slots), size)
    pool = torch.zeros(9, 2, kv_heads, 4, size)
    wanted_pool = pool.double()
    wanted = reference.rope_write_kv(
        lambda x, weight, eps: F.rms_norm(x, x.shape[-1:], weight, eps),
        qkv.double(), cos.double(), sin.double(), wide, wanted_pool, meta_of(slots),
    )  # fmt: skip
    close(turn_with(isa, never)(qkv, cos, sin, norms, pool, meta_of(slots)), wanted)
    close(pool, wanted_pool)


def test_a_pool_of_bfloat16_has_what_pytorch_rounds_to(isa: library.Isa) -> None:
    torch.manual_seed(3)
    cos, sin = rotation(3, 10)
    qkv, slots = torch.randn(3, 7 * 10), [5, 0, 14]
    floats, written, wanted = (
        torch.zeros(4, 2, 2, 4, 10, dtype=dtype) for dtype in (torch.float, *2 * [torch.bfloat16])
    )
    queries = turn_with(isa, never)(qkv, cos, sin, None, floats, meta_of(slots))
    for own, pool in ((library.Isa.AVX512_BF16, written), (isa, wanted)):
        if own in library.instruction_sets():
            got = turn_with(own, never)(qkv, cos, sin, None, pool, meta_of(slots))
            torch.testing.assert_close(got, queries, atol=2e-6, rtol=2e-6)
    assert torch.equal(wanted, floats.bfloat16())
    if library.Isa.AVX512_BF16 in library.instruction_sets() and isa == library.Isa.AVX512:
        assert torch.equal(written, wanted)


def test_pools_of_other_numbers_are_filled_by_pytorch(isa: library.Isa) -> None:
    torch.manual_seed(1)
    cos, sin = rotation(3, 16)
    qkv, slots = torch.randn(3, 4 * 16), [5, 0, 9]

    def pool() -> KVLayer:
        return ScaledKV(torch.zeros(4, 2, 1, 4, 16, dtype=torch.int8), torch.zeros(4, 2, 1, 4))

    own, wanted = pool(), pool()
    close(
        turn_with(isa, never)(qkv, cos, sin, None, own, meta_of(slots)),
        TURNED(qkv, cos, sin, None, wanted, meta_of(slots)).double(),
    )
    assert isinstance(own, ScaledKV)
    assert isinstance(wanted, ScaledKV)
    assert (own.data.int() - wanted.data.int()).abs().max() <= 1
    close(own.scales, wanted.scales.double())


def test_a_row_has_the_same_bits_whatever_comes_with_it(isa: library.Isa) -> None:
    torch.manual_seed(2)
    x, residual, weight = torch.randn(300, 896), torch.randn(300, 896), torch.randn(896)
    together = add_norm_with(isa, never)(x, residual, weight, 1e-5)[1]
    gated = gate_with(isa, 0, never)(x)
    for row in (0, 150, 299):
        own = slice(row, row + 1)
        alone = add_norm_with(isa, never)(x[own], residual[own], weight, 1e-5)[1]
        assert torch.equal(alone, together[own])
        assert torch.equal(gate_with(isa, 0, never)(x[own]), gated[own])


def test_other_dtypes_and_strides_are_not_given_to_pointers() -> None:
    plain = reference.reference_ops()
    ops = with_native_rows(plain)
    for x in (torch.randn(3, 8, dtype=torch.bfloat16), torch.randn(3, 16)[:, ::2], torch.randn(0, 8)):
        weight = torch.randn(8)
        assert torch.equal(ops.rms_norm(x, weight, 1e-5), plain.rms_norm(x, weight, 1e-5))
        assert torch.equal(ops.silu_mul(x), plain.silu_mul(x))
    pool, (cos, sin) = torch.zeros(4, 2, 1, 4, 8), rotation(1, 8)
    for slots in ([16], [-1]):
        with pytest.raises(ValueError, match="slots below 16"):
            ops.rope_write_kv(torch.randn(1, 24), cos, sin, None, pool, meta_of(slots))
    with pytest.raises(ValueError, match="1 tokens, as the step says, not 2"):
        ops.rope_write_kv(torch.randn(2, 24), *rotation(2, 8), None, pool, meta_of([3]))
