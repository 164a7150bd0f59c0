"""Attention launched alike whatever the lengths, over one FixedStep that many steps are filled into."""

import pytest
import torch

from kernels.ops import ScaledKV
from kernels.rounding import rounded
from kernels.triton.attention import TritonAttention
from kernels.triton.fixed_step import TritonFixedStep
from kernels.triton.latent import absorbed_attention, latent_attention
from tests.kernels.paged_step import Step, expected, make_step

MAX_BLOCKS = 40
POOL = 2 * MAX_BLOCKS
"""Blocks of the pool, where splits at fixed places have places for all of its tokens."""
Lens = list[tuple[int, int]]
"""Query and context tokens of each sequence."""
DECODE: list[Lens] = [[(1, n) for n in lens] for lens in ([70, 1, 33], [170, 5, 1], [1, 1, 1], [18, 40, 130])]
"""Contexts of steps that follow each other: longer and shorter, split or not."""
MIXED: list[Lens] = [[(1, 70), (20, 20), (3, 33)], [(21, 120), (1, 9)], [(4, 90)]]
"""Prompts, whole and in pieces, draft tokens, and sequences that decode."""
HEADS = [((4, 2), 7, 2.0, False), ((20, 1), 40, 0.0, True), ((3, 3), 0, 0.0, False)]
"""Heads, window, soft cap, and whether there are sinks."""


def fixed_steps(
    device: torch.device, split_tokens: int = 0, *, empty: int = POOL
) -> list[tuple[TritonFixedStep, list[Lens]]]:
    """Return ones without and with tall tiles, and steps that they are filled with."""
    low = TritonFixedStep(24, 3, MAX_BLOCKS, empty, 8, device, split_tokens)
    return [(low, DECODE[:1] + MIXED), (low.smaller(24, tall=True), MIXED), (low.smaller(3), DECODE)]


def filled(fixed: TritonFixedStep, step: Step) -> TritonFixedStep:
    tables = [table.numpy() for table in step.meta.block_tables]
    slots = range(sum(step.meta.query_lens))
    inputs = fixed.inputs(step.meta.query_lens, step.meta.context_lens, tables, slots)
    fixed.fill([torch.from_numpy(each).to(step.q.device) for each in inputs])
    return fixed


def padded(q: torch.Tensor, fixed: TritonFixedStep) -> torch.Tensor:
    return torch.cat((q, torch.randn(len(fixed.meta.slots) - len(q), *q.shape[1:], device=q.device)))


@pytest.mark.parametrize(("heads", "window", "soft_cap", "sinks"), HEADS)
def test_any_steps_through_one_plan(
    device: torch.device, heads: tuple[int, int], window: int, soft_cap: float, sinks: bool
) -> None:
    attend, sink = TritonAttention(), torch.randn(heads[0], device=device) if sinks else None
    for fixed, steps in fixed_steps(device):
        for seed, lens in enumerate(steps):
            step = make_step(lens, heads=heads, block_size=8, seed=seed, device=device)
            meta = filled(fixed, step).meta
            got = attend(padded(step.q, fixed), step.kv_layer, meta, 0.7, window, soft_cap, sink)
            want = expected(step, 0.7, window, soft_cap, sink)
            torch.testing.assert_close(got[: len(want)].cpu().double(), want, atol=4e-6, rtol=1e-5)
            assert not got[len(want) :].any(), "rows behind the last sequence see nothing"


@pytest.mark.parametrize(("heads", "window", "soft_cap", "sinks"), HEADS)
def test_splits_at_fixed_places_give_the_bits_of_a_launched_step(
    device: torch.device, heads: tuple[int, int], window: int, soft_cap: float, sinks: bool
) -> None:
    """Splits of 32 tokens: up to ten of a context, and none of what is before its window."""
    attend, sink = TritonAttention(32), torch.randn(heads[0], device=device) if sinks else None
    for fixed, steps in fixed_steps(device, 32, empty=400):
        for seed, lens in enumerate(steps):
            step = make_step(lens, heads=heads, block_size=8, seed=seed, device=device)
            want = attend(step.q, step.kv_layer, step.meta, 0.7, window, soft_cap, sink)
            meta = filled(fixed, step).meta
            got = attend(padded(step.q, fixed), step.kv_layer, meta, 0.7, window, soft_cap, sink)
            assert torch.equal(got[: len(want)], want)
            torch.testing.assert_close(
                want.cpu().double(), expected(step, 0.7, window, soft_cap, sink), atol=4e-6, rtol=1e-5
            )


def test_results_of_a_window_are_added_as_those_of_a_launched_step(device: torch.device) -> None:
    """Eight at a time, from the context's first split on, whichever is the window's first: here they begin with the seventh."""
    attend = TritonAttention(32)
    step = make_step([(1, n) for n in (320, 290, 1)], head_dim=16, block_size=8, device=device)
    want = attend(step.q, step.kv_layer, step.meta, 0.7, 100, 0.0)
    torch.testing.assert_close(want.cpu().double(), expected(step, 0.7, 100, 0.0), atol=4e-6, rtol=1e-5)
    for fixed, _ in fixed_steps(device, 32):
        got = attend(padded(step.q, fixed), step.kv_layer, filled(fixed, step).meta, 0.7, 100, 0.0)
        assert torch.equal(got[:3], want)


def test_splits_at_fixed_places_of_latents(device: torch.device) -> None:
    rank = 16
    for fixed, steps in fixed_steps(device, 32, empty=400):
        for seed, lens in enumerate(steps):
            step = make_step(lens, block_size=8, seed=seed, device=device)
            latents = torch.randn(len(step.kv_layer), 1, 1, 8, rank + 8, device=device)
            q = torch.randn(len(step.q), 4, rank + 8, device=device)
            want = absorbed_attention(q, latents, step.meta, 0.3, rank, 32)
            got = absorbed_attention(padded(q, fixed), latents, filled(fixed, step).meta, 0.3, rank, 32)
            assert torch.equal(got[: len(q)], want)


def test_contexts_of_a_whole_pool_have_places_and_those_that_share_more_do_not(device: torch.device) -> None:
    """A pool of 400 tokens, contexts of 320 at most."""

    def fits(lens: Lens, *, pool: int = 50, split_tokens: int = 32, tall: bool = False) -> bool:
        fixed = TritonFixedStep(3, 3, 40, pool, 8, device, split_tokens).smaller(3, tall=tall)
        step = make_step([(1, 1)] * 3, block_size=8, device=device)
        TritonAttention(split_tokens)(step.q, step.kv_layer, fixed.meta, 0.7, 0, 0.0)
        return fixed.fits([query for query, _ in lens], [context for _, context in lens])

    for contexts in ([320, 79, 1], [133, 133, 133], [1, 1, 1], [320]):
        for tall in (False, True):
            assert fits([(1, n) for n in contexts], tall=tall)
    assert fits([(2, 320), (1, 79)])
    assert not fits([(1, n) for n in (320, 79, 65)])
    assert fits([(1, 320)], pool=4000)
    assert fits([(1, 320)] * 3, split_tokens=0)


def test_there_are_tables_for_as_many_sequences_as_were_named(device: torch.device) -> None:
    fixed = TritonFixedStep(8, 2, MAX_BLOCKS, POOL, 8, device)
    assert fixed.fits([1, 7], [1, 7])
    assert not fixed.fits([1, 1, 1], [1, 1, 1])


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int8])
def test_over_a_cache_of_8_bits(device: torch.device, dtype: torch.dtype) -> None:
    attend = TritonAttention()
    for fixed, steps in fixed_steps(device):
        for seed, lens in enumerate(steps[::2]):
            step = make_step(lens, head_dim=16, block_size=8, seed=seed, device=device)
            clean = step.kv_layer.nan_to_num()
            values, scales = rounded(clean.reshape(-1, 16), dtype)
            layer = ScaledKV(values.view(clean.shape), scales.view(clean.shape[:-1]))
            want = attend(step.q, layer, step.meta, 0.7, 0, 0.0)
            got = attend(padded(step.q, fixed), layer, filled(fixed, step).meta, 0.7, 0, 0.0)
            torch.testing.assert_close(got[: len(want)], want, atol=4e-6, rtol=1e-5)


def test_latents(device: torch.device) -> None:
    rank, rotated, heads = 16, 8, 4
    k_up, v_up = (torch.randn(heads, 12, rank, device=device) for _ in range(2))
    for fixed, steps in fixed_steps(device):
        for seed, lens in enumerate(steps):
            step = make_step(lens, block_size=8, seed=seed, device=device)
            latents = torch.randn(len(step.kv_layer), 1, 1, 8, rank + rotated, device=device)
            q = torch.randn(len(step.q), heads, 12 + rotated, device=device)
            want = latent_attention(q, latents, step.meta, 0.3, k_up, v_up)
            got = latent_attention(padded(q, fixed), latents, filled(fixed, step).meta, 0.3, k_up, v_up)
            torch.testing.assert_close(got[: len(q)], want, atol=4e-6, rtol=1e-5)


def test_what_is_behind_a_context_and_in_others_tables_is_not_read(device: torch.device) -> None:
    """Steps before have left blocks in the table that are NaN now, and places of items."""
    attend = TritonAttention()
    for fixed, _ in fixed_steps(device):
        for seed, lens in enumerate(([150, 200], [9, 3])):
            step = make_step([(1, n) for n in lens], block_size=8, seed=seed, device=device)
            got = attend(padded(step.q, fixed), step.kv_layer, filled(fixed, step).meta, 0.7, 0, 0.0)
            want = expected(step, 0.7, 0, 0.0)
            torch.testing.assert_close(got[:2].cpu().double(), want, atol=4e-6, rtol=1e-5)


@pytest.mark.parametrize("split_tokens", [0, 32])
def test_steps_of_fewer_tokens_take_turns_in_the_memory_of_the_largest(
    split_tokens: int, device: torch.device
) -> None:
    largest = TritonFixedStep(24, 3, MAX_BLOCKS, 400, 8, device, split_tokens)
    attend, sizes = TritonAttention(split_tokens), (3, 10, 24)
    each = {(size, tall): largest.smaller(size, tall=tall) for size in sizes for tall in (False, True)}
    for seed, lens in enumerate([[(1, 70), (1, 1), (1, 33)], [(1, 170), (9, 40)], [(9, 9)], MIXED[0]]):
        num = sum(query for query, _ in lens)
        step = make_step(lens, block_size=8, seed=seed, device=device)
        want = expected(step, 0.7, 0, 0.0)
        for tall in (False, True):
            fixed = each[next(size for size in sizes if size >= num), tall]
            got = attend(padded(step.q, fixed), step.kv_layer, filled(fixed, step).meta, 0.7, 0, 0.0)
            torch.testing.assert_close(got[:num].cpu().double(), want, atol=4e-6, rtol=1e-5)


def test_rows_behind_the_last_sequence_are_written_into_a_block_of_nobody(device: torch.device) -> None:
    step = make_step([(3, 70), (1, 9)], block_size=8, device=device)
    fixed = filled(TritonFixedStep(6, 4, MAX_BLOCKS, POOL, 8, device), step)
    assert fixed.meta.slots.tolist() == [0, 1, 2, 3, 8 * POOL, 8 * POOL]
    assert fixed.meta.counted is not None
    assert fixed.meta.counted.tolist() == [1, 1, 1, 1, 0, 0]
