"""Decode attention launched alike whatever the lengths, over one FixedDecode that many steps are filled into."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.ops import ScaledKV
from kernels.rounding import rounded
from kernels.triton.attention import TritonAttention
from kernels.triton.attention_config import AttentionConfig
from kernels.triton.fixed_decode import TritonFixedDecode, split_all
from kernels.triton.latent import absorbed_attention, latent_attention
from tests.kernels.paged_step import Step, expected, make_step

MAX_BLOCKS = 40
POOL = 2 * MAX_BLOCKS
"""Blocks of the pool, where splits at fixed places have places for all of its tokens."""
STEPS = [[70, 1, 33], [170, 5, 1], [1, 1, 1], [18, 40, 130]]
"""Contexts of steps that follow each other: longer and shorter, split or not."""


HEADS = [((4, 2), 0, 0.0, False), ((4, 2), 7, 2.0, False), ((20, 1), 40, 0.0, True), ((3, 3), 0, 0.0, False)]
"""Heads, window, soft cap, and whether there are sinks."""


def filled(fixed: TritonFixedDecode, step: Step) -> TritonFixedDecode:
    tables = [table.numpy() for table in step.meta.block_tables]
    inputs = fixed.inputs(step.meta.context_lens, tables, range(len(tables)))
    fixed.fill([torch.from_numpy(each).to(step.q.device) for each in inputs])
    return fixed


@pytest.mark.parametrize(("heads", "window", "soft_cap", "sinks"), HEADS)
def test_any_steps_through_one_plan(
    device: torch.device, heads: tuple[int, int], window: int, soft_cap: float, sinks: bool
) -> None:
    fixed, attend = TritonFixedDecode(3, MAX_BLOCKS, 0, 8, device), TritonAttention()
    sink = torch.randn(heads[0], device=device) if sinks else None
    for seed, lens in enumerate(STEPS):
        step = make_step([(1, n) for n in lens], heads=heads, block_size=8, seed=seed, device=device)
        got = attend(step.q, step.kv_layer, filled(fixed, step).meta, 0.7, window, soft_cap, sink)
        want = expected(step, 0.7, window, soft_cap, sink)
        torch.testing.assert_close(got.cpu().double(), want, atol=4e-6, rtol=1e-5)


@pytest.mark.parametrize(("heads", "window", "soft_cap", "sinks"), HEADS)
def test_splits_at_fixed_places_give_the_bits_of_a_launched_step(
    device: torch.device, heads: tuple[int, int], window: int, soft_cap: float, sinks: bool
) -> None:
    """Splits of 32 tokens: up to six of a context, and none of what is before its window."""
    fixed, attend = TritonFixedDecode(3, MAX_BLOCKS, POOL, 8, device, 32), TritonAttention(32)
    sink = torch.randn(heads[0], device=device) if sinks else None
    for seed, lens in enumerate(STEPS):
        step = make_step([(1, n) for n in lens], heads=heads, block_size=8, seed=seed, device=device)
        want = attend(step.q, step.kv_layer, step.meta, 0.7, window, soft_cap, sink)
        assert torch.equal(
            attend(step.q, step.kv_layer, filled(fixed, step).meta, 0.7, window, soft_cap, sink), want
        )
        torch.testing.assert_close(
            want.cpu().double(), expected(step, 0.7, window, soft_cap, sink), atol=4e-6, rtol=1e-5
        )


def test_results_of_a_window_are_added_as_those_of_a_launched_step(device: torch.device) -> None:
    """Eight at a time, from the context's first split on, whichever is the window's first: here they begin with the seventh."""
    fixed, attend = TritonFixedDecode(3, MAX_BLOCKS, POOL, 8, device, 32), TritonAttention(32)
    step = make_step([(1, n) for n in (320, 290, 1)], head_dim=16, block_size=8, device=device)
    want = attend(step.q, step.kv_layer, step.meta, 0.7, 100, 0.0)
    assert torch.equal(attend(step.q, step.kv_layer, filled(fixed, step).meta, 0.7, 100, 0.0), want)
    torch.testing.assert_close(want.cpu().double(), expected(step, 0.7, 100, 0.0), atol=4e-6, rtol=1e-5)


def test_splits_at_fixed_places_of_latents(device: torch.device) -> None:
    fixed, rank = TritonFixedDecode(3, MAX_BLOCKS, POOL, 8, device, 32), 16
    for seed, lens in enumerate(STEPS):
        step = make_step([(1, n) for n in lens], block_size=8, seed=seed, device=device)
        latents = torch.randn(len(step.kv_layer), 1, 1, 8, rank + 8, device=device)
        q = torch.randn(3, 4, rank + 8, device=device)
        want = absorbed_attention(q, latents, step.meta, 0.3, rank, 32)
        assert torch.equal(absorbed_attention(q, latents, filled(fixed, step).meta, 0.3, rank, 32), want)


def test_contexts_of_a_whole_pool_have_places_and_those_that_share_more_do_not(device: torch.device) -> None:
    fixed = TritonFixedDecode(3, 40, 50, 8, device, 32)  # a pool of 400 tokens, contexts of 320 at most
    for lens in ([320, 79, 1], [133, 133, 133], [1, 1, 1], [320]):
        assert fixed.fits(lens)
    assert not fixed.fits([320, 79, 65])
    assert TritonFixedDecode(1, 40, 4000, 8, device, 32).fits([320])
    assert TritonFixedDecode(3, 40, 50, 8, device).fits([320, 320, 320])


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int8])
def test_over_a_cache_of_8_bits(device: torch.device, dtype: torch.dtype) -> None:
    fixed, attend = TritonFixedDecode(3, MAX_BLOCKS, 0, 8, device), TritonAttention()
    for seed, lens in enumerate(STEPS[:2]):
        step = make_step([(1, n) for n in lens], head_dim=16, block_size=8, seed=seed, device=device)
        clean = step.kv_layer.nan_to_num()
        values, scales = rounded(clean.reshape(-1, 16), dtype)
        layer = ScaledKV(values.view(clean.shape), scales.view(clean.shape[:-1]))
        want = attend(step.q, layer, step.meta, 0.7, 0, 0.0)
        got = attend(step.q, layer, filled(fixed, step).meta, 0.7, 0, 0.0)
        torch.testing.assert_close(got, want, atol=4e-6, rtol=1e-5)


def test_latents(device: torch.device) -> None:
    fixed, rank, rotated, heads = TritonFixedDecode(3, MAX_BLOCKS, 0, 8, device), 16, 8, 4
    k_up, v_up = (torch.randn(heads, 12, rank, device=device) for _ in range(2))
    for seed, lens in enumerate(STEPS):
        step = make_step([(1, n) for n in lens], block_size=8, seed=seed, device=device)
        blocks = len(step.kv_layer)
        latents = torch.randn(blocks, 1, 1, 8, rank + rotated, device=device)
        q = torch.randn(3, heads, 12 + rotated, device=device)
        want = latent_attention(q, latents, step.meta, 0.3, k_up, v_up)
        got = latent_attention(q, latents, filled(fixed, step).meta, 0.3, k_up, v_up)
        torch.testing.assert_close(got, want, atol=4e-6, rtol=1e-5)


def test_what_is_behind_a_context_and_in_others_tables_is_not_read(device: torch.device) -> None:
    """Steps before have left blocks in the table that are NaN now, and places of items."""
    fixed, attend = TritonFixedDecode(2, MAX_BLOCKS, 0, 8, device), TritonAttention()
    long = make_step([(1, 150), (1, 200)], block_size=8, device=device)
    attend(long.q, long.kv_layer, filled(fixed, long).meta, 0.7, 0, 0.0)
    short = make_step([(1, 9), (1, 3)], block_size=8, seed=1, device=device)
    got = attend(short.q, short.kv_layer, filled(fixed, short).meta, 0.7, 0, 0.0)
    torch.testing.assert_close(got.cpu().double(), expected(short, 0.7, 0, 0.0), atol=4e-6, rtol=1e-5)


@pytest.mark.parametrize("split_tokens", [0, 32])
def test_steps_of_fewer_sequences_take_turns_in_the_memory_of_the_largest(
    split_tokens: int, device: torch.device
) -> None:
    largest, attend = (
        TritonFixedDecode(3, MAX_BLOCKS, POOL, 8, device, split_tokens),
        TritonAttention(split_tokens),
    )
    each = {3: largest, 2: largest.smaller(2), 1: largest.smaller(1)}
    for seed, lens in enumerate([[70, 1, 33], [170, 40], [9], [18, 40, 130], [18, 1]]):
        step = make_step([(1, n) for n in lens], block_size=8, seed=seed, device=device)
        got = attend(step.q, step.kv_layer, filled(each[len(lens)], step).meta, 0.7, 0, 0.0)
        torch.testing.assert_close(got.cpu().double(), expected(step, 0.7, 0, 0.0), atol=4e-6, rtol=1e-5)


def test_rows_behind_the_last_sequence_have_a_token_of_nobody(device: torch.device) -> None:
    step = make_step([(1, n) for n in (70, 9)], block_size=8, device=device)
    empty = len(step.kv_layer)
    layer = torch.cat((step.kv_layer, torch.zeros_like(step.kv_layer[:1])))
    fixed, attend = TritonFixedDecode(4, MAX_BLOCKS, empty, 8, device), TritonAttention()
    q = torch.cat((step.q, torch.randn_like(step.q)))
    got = attend(q, layer, filled(fixed, step).meta, 0.7, 0, 0.0)
    torch.testing.assert_close(got[:2].cpu().double(), expected(step, 0.7, 0, 0.0), atol=4e-6, rtol=1e-5)
    assert not got[2:].any()
    assert fixed.meta.slots.tolist() == [0, 1, 8 * empty, 8 * empty]
    assert fixed.meta.counted is not None
    assert fixed.meta.counted.tolist() == [1, 1, 0, 0]


@settings(deadline=None)
@given(
    lens=st.lists(st.integers(1, 200_000), min_size=1, max_size=40),
    window=st.sampled_from([0, 1, 100, 4096]),
    more=st.integers(1, 100),
    block_n=st.sampled_from([16, 64]),
)
def test_splits_hold_all_tokens_and_fit_the_table(
    lens: list[int], window: int, more: int, block_n: int
) -> None:
    most, each = len(lens) + more, np.array(lens, np.int32)
    begins = np.maximum(each - window, 0) // block_n * block_n if window else np.zeros_like(each)
    config = AttentionConfig(block_m=16, block_n=block_n, heads=4, num_warps=4, num_stages=3)
    bases, firsts, splits, tokens = split_all(each, begins, most, config)
    assert not firsts.any()
    assert not (tokens % block_n).any()
    assert splits.sum() <= most
    assert splits.min() >= 1
    assert (bases == begins).all()
    assert (splits * tokens >= each - begins).all()
