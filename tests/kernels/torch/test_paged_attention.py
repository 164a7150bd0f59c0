"""Paged attention against its definition: for each query a softmax over what it may see, in float64."""

import random

import pytest
import torch
from torch.nn import functional as F

from kernels.torch.paged_attention import PagedAttention
from tests.kernels.paged_step import Step, expected, make_step

HEADS = {"grouped": (6, 2), "single": (1, 1), "equal": (3, 3), "one_kv_head": (4, 1)}


@torch.inference_mode()
def attend(
    step: Step, scale: float, window: int, soft_cap: float, sinks: torch.Tensor | None = None
) -> torch.Tensor:
    return PagedAttention()(step.q, step.kv_layer, step.meta, scale, window, soft_cap, sinks)


@pytest.mark.parametrize("soft_cap", [0.0, 2.0])
@pytest.mark.parametrize("window", [0, 1, 4, 7, 1000])
@pytest.mark.parametrize("heads", HEADS)
def test_any_mix_of_sequences(heads: str, window: int, soft_cap: float) -> None:
    rng = random.Random(f"{heads}{window}{soft_cap}")
    lens = [(1, rng.randint(1, 90)) for _ in range(5)]
    lens += [(query, query + rng.choice((0, 1, 13, 40))) for query in (2, 5, 17)]
    rng.shuffle(lens)
    step = make_step(lens, heads=HEADS[heads], block_size=rng.choice((1, 4, 16)))
    got = attend(step, 0.7, window, soft_cap)
    torch.testing.assert_close(got.double(), expected(step, 0.7, window, soft_cap), atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("window", [0, 5])
@pytest.mark.parametrize("heads", HEADS)
def test_a_sink_takes_its_share_of_every_head(heads: str, window: int) -> None:
    step = make_step([(1, 30), (1, 3), (150, 190), (4, 4)], heads=HEADS[heads])
    sinks = torch.linspace(-3.0, 4.0, HEADS[heads][0])
    got = attend(step, 0.7, window, 0.0, sinks)
    torch.testing.assert_close(got.double(), expected(step, 0.7, window, 0.0, sinks), atol=2e-6, rtol=1e-5)
    assert not torch.allclose(got, attend(step, 0.7, window, 0.0), atol=1e-2)


@pytest.mark.parametrize("window", [0, 50, 200])
def test_a_chunk_of_several_tiles(window: int) -> None:
    step = make_step([(300, 437), (129, 129), (128, 130)], block_size=16)
    got = attend(step, 0.4, window, 0.0)
    torch.testing.assert_close(got.double(), expected(step, 0.4, window, 0.0), atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("soft_cap", [0.0, 2.0])
@pytest.mark.parametrize("window", [0, 1, 7, 60, 1000])
def test_tokens_that_see_later_ones(window: int, soft_cap: float) -> None:
    """All of their context, but for what a window hides of what is before them."""
    lens = [(17, 17), (9, 40), (1, 30), (150, 190), (5, 60), (130, 130)]
    both_ways = (True, False, True, True, True, False)
    step = make_step(lens, block_size=16, both_ways=both_ways)
    got = attend(step, 0.4, window, soft_cap)
    torch.testing.assert_close(got.double(), expected(step, 0.4, window, soft_cap), atol=2e-6, rtol=1e-5)


def test_more_decoding_sequences_than_are_gathered_at_once() -> None:
    lens = [(1, context) for context in (33, 700, 1, 512, 90, 300, 640, 64, 65, 15)]
    step = make_step(lens, heads=(8, 8), head_dim=64, block_size=16)
    got = attend(step, 0.1, 0, 0.0)
    torch.testing.assert_close(got.double(), expected(step, 0.1, 0, 0.0), atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("soft_cap", [0.0, 2.0])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sixteen_bits(soft_cap: float, dtype: torch.dtype) -> None:
    step = make_step([(1, 40), (9, 30), (1, 3)], dtype=dtype)
    got = attend(step, 0.3, 11, soft_cap)
    assert got.dtype == dtype
    torch.testing.assert_close(got.double(), expected(step, 0.3, 11, soft_cap), atol=3e-2, rtol=3e-2)


@torch.inference_mode()
def test_layers_of_different_windows_share_a_step_and_steps_share_an_object() -> None:
    attention = PagedAttention()
    for seed, lens in enumerate(([(1, 50), (20, 60)], [(1, 9), (1, 130)], [(3, 3), (1, 70)])):
        step = make_step(lens, seed=seed)
        half = make_step(lens, seed=seed, dtype=torch.bfloat16)
        attention(half.q, half.kv_layer, half.meta, 0.5, 0, 0.0, None)
        for window in (0, 6, 0, 30):
            got = attention(step.q, step.kv_layer, step.meta, 0.5, window, 0.0, None)
            torch.testing.assert_close(got.double(), expected(step, 0.5, window, 0.0), atol=2e-6, rtol=1e-5)


def test_a_neighbours_nan_stays_with_the_neighbour() -> None:
    step = make_step([(1, 10), (1, 11), (6, 12)])
    clean = attend(step, 0.5, 0, 0.0)
    broken = step.meta.block_tables[1]
    step.kv_layer[broken] = torch.nan
    step.meta.cache.clear()
    got = attend(step, 0.5, 0, 0.0)
    assert got[1].isnan().all()
    torch.testing.assert_close(got[[0, 2, 3, 4, 5, 6, 7]], clean[[0, 2, 3, 4, 5, 6, 7]])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("window", [0, 40])
def test_what_is_attended_begins_at_a_multiple_of_16_bytes(
    window: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PyTorch's kernels of GPUs read as much at once, and do not look where a mask begins."""
    attended, odd = F.scaled_dot_product_attention, list[int]()

    def looked_at(*tensors: torch.Tensor, attn_mask: torch.Tensor | None, scale: float) -> torch.Tensor:
        odd.extend(each.data_ptr() % 16 for each in (*tensors, attn_mask) if each is not None)
        return attended(*tensors, attn_mask=attn_mask, scale=scale)

    monkeypatch.setattr(F, "scaled_dot_product_attention", looked_at)
    lens = [(query, query + before) for query in (2, 3, 17, 130) for before in (0, 1, 5, 14)]
    step = make_step([*lens, (1, 7), (1, 30)], block_size=16, dtype=dtype)
    attend(step, 0.4, window, 0.0)
    assert len(odd) >= 4 * len(lens)
    assert not any(odd)
