"""The batch-invariant operations of a CPU against their definitions, over contexts of several spans; and which tiles are used."""

import pytest
import torch

from kernels.cpu.invariant_ops import invariant_ops
from kernels.cpu.library import native
from kernels.cpu.prepacked import WeightFormat
from kernels.torch.invariant_attention import InvariantAttention
from kernels.torch.row_tiles import RowTiles, agreeing, cuts
from tests.kernels.paged_step import expected, make_step
from tests.kernels.torch.test_latent_attention import attention

LENS = [(1, 700), (60, 300), (1, 1), (5, 256), (1, 257)]


@pytest.mark.parametrize(("window", "soft_cap"), [(0, 0.0), (100, 0.0), (7, 3.0), (0, 3.0)])
@pytest.mark.parametrize("with_sinks", [False, True])
def test_attention(window: int, soft_cap: float, with_sinks: bool) -> None:
    step = make_step(LENS, block_size=16)
    sinks = torch.randn(4) if with_sinks else None
    got = InvariantAttention(RowTiles())(step.q, step.kv_layer, step.meta, 0.7, window, soft_cap, sinks)
    want = expected(step, 0.7, window, soft_cap, sinks)
    torch.testing.assert_close(got.double(), want, atol=4e-6, rtol=1e-5)


@pytest.mark.parametrize("window", [0, 7, 300])
def test_tokens_that_see_later_ones(window: int) -> None:
    step = make_step(
        [(60, 300), (9, 40), (300, 300)], head_dim=16, block_size=16, both_ways=(True, False, True)
    )
    got = InvariantAttention(RowTiles())(step.q, step.kv_layer, step.meta, 0.7, window, 0.0, None)
    torch.testing.assert_close(got.double(), expected(step, 0.7, window, 0.0), atol=4e-6, rtol=1e-5)


def test_latent_attention() -> None:
    got, want = attention(LENS, torch.float32, 3, deterministic=True)
    torch.testing.assert_close(got.double(), want, atol=4e-6, rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("weights", ["full", "half", "int8", "int4"])
@pytest.mark.skipif(native() is None, reason="there are no native kernels here")
def test_packed_products_of_a_row_have_the_same_bits_in_every_batch(
    dtype: torch.dtype, weights: WeightFormat
) -> None:
    ops = invariant_ops(weights)
    weight, x = torch.randn(600, 512).to(dtype), torch.randn(70, 512).to(dtype)
    packed = ops.pack(weight, dtype)
    whole = ops.linear(x, packed, None)
    for count in (1, 3, 16, 64):
        assert torch.equal(torch.cat([ops.linear(part, packed, None) for part in x.split(count)]), whole)


def test_a_place_that_changes_bits_leaves_lower_tiles() -> None:
    def worse_in_the_last_place(x: torch.Tensor) -> list[torch.Tensor]:
        out = x.clone()
        if len(x) == 64:
            out[-1] += 1e-6
        return [out]

    assert agreeing(worse_in_the_last_place, [torch.randn(64, 3)]) == (16, 4, 1)


def test_heights_that_add_up_in_other_ways_are_left_out() -> None:
    def another_way_for_one(x: torch.Tensor) -> list[torch.Tensor]:
        return [x + 1 if len(x) == 1 else x]

    assert agreeing(another_way_for_one, [torch.randn(64, 3)]) == (64, 16, 4)


def test_tiles_hold_every_row_once() -> None:
    for heights in ((64, 16, 4, 1), (64, 16), (64,), (16, 4), (1,)):
        for num_rows in range(1, 300):
            edges = [0]
            for start, end, height in cuts(num_rows, heights):
                assert start == edges[-1]
                assert start < end <= start + height
                assert height in heights
                edges.append(end)
            assert edges[-1] == num_rows


def test_what_has_no_rows_stays_so() -> None:
    ops = invariant_ops()
    assert ops.linear(torch.empty(0, 6), torch.randn(5, 6), None).shape == (0, 5)
    assert RowTiles().one("exp", torch.exp, torch.empty(0, 2)).shape == (0, 2)
