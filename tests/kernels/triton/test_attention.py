"""Paged attention against its definition, over the shapes and masks of models, quantised caches, and any cut of a step."""

import itertools
import random

import numpy as np
import pytest
import torch

from kernels.ops import AttentionMeta, ScaledKV
from kernels.rounding import rounded
from kernels.triton.attention import TritonAttention
from tests.kernels.paged_step import Step, expected, make_step
from tests.kernels.triton.places import need_equal_places

HEADS = {"grouped": (6, 2), "single": (1, 1), "equal": (3, 3), "one_kv_head": (20, 1)}
LENS = [(1, 70), (5, 18), (1, 1), (17, 57), (1, 33), (3, 3)]


def attend(step: Step, window: int, soft_cap: float, sinks: torch.Tensor | None = None) -> torch.Tensor:
    return TritonAttention()(step.q, step.kv_layer, step.meta, 0.7, window, soft_cap, sinks).cpu().double()


@pytest.mark.parametrize(("window", "soft_cap"), [(0, 0.0), (7, 0.0), (1, 2.0), (1000, 0.0), (30, 2.0)])
@pytest.mark.parametrize("heads", HEADS)
def test_any_mix_of_sequences(device: torch.device, heads: str, window: int, soft_cap: float) -> None:
    rng = random.Random(f"{heads}{window}{soft_cap}")
    lens = [*LENS, (1, rng.randint(1, 90))]
    rng.shuffle(lens)
    step = make_step(lens, heads=HEADS[heads], block_size=rng.choice((1, 4, 16)), device=device)
    got = attend(step, window, soft_cap)
    torch.testing.assert_close(got, expected(step, 0.7, window, soft_cap), atol=4e-6, rtol=1e-5)


@pytest.mark.parametrize("head_dim", [16, 24, 64, 128])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision(device: torch.device, dtype: torch.dtype, head_dim: int) -> None:
    step = make_step(LENS[:4], head_dim=head_dim, dtype=dtype, device=device)
    tolerance = 3e-2 if dtype == torch.bfloat16 else 4e-3
    got = TritonAttention()(step.q, step.kv_layer, step.meta, head_dim**-0.5, 0, 0.0)
    assert got.dtype == dtype
    want = expected(step, head_dim**-0.5, 0, 0.0)
    torch.testing.assert_close(got.cpu().double(), want, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize(("head_dim", "both_ways"), [(64, False), (128, False), (128, True)])
def test_prompts_in_half_precision(device: torch.device, head_dim: int, both_ways: bool) -> None:
    lens = [(30, 400), (40, 40), (1, 9), (20, 129)]
    seen = (both_ways,) * len(lens) if both_ways else ()
    step = make_step(
        lens,
        heads=(8, 2),
        head_dim=head_dim,
        block_size=16,
        dtype=torch.float16,
        device=device,
        both_ways=seen,
    )
    sinks = torch.randn(8, device=device)
    got = TritonAttention()(step.q, step.kv_layer, step.meta, head_dim**-0.5, 0, 0.0, sinks)
    want = expected(step, head_dim**-0.5, 0, 0.0, sinks)
    torch.testing.assert_close(got.cpu().double(), want, atol=4e-3, rtol=4e-3)


@pytest.mark.parametrize("lens", [[(1, 300)], LENS], ids=["split", "whole"])
@pytest.mark.parametrize("window", [0, 9])
def test_sinks(device: torch.device, lens: list[tuple[int, int]], window: int) -> None:
    step, sinks = make_step(lens, device=device), torch.randn(4, device=device) * 2
    got = attend(step, window, 0.0, sinks)
    torch.testing.assert_close(got, expected(step, 0.7, window, 0.0, sinks), atol=4e-6, rtol=1e-5)


@pytest.mark.parametrize("split_tokens", [0, 64], ids=["fast", "invariant"])
@pytest.mark.parametrize("window", [0, 9, 60])
def test_tokens_that_see_later_ones(device: torch.device, window: int, split_tokens: int) -> None:
    """All of their context, but for what a window hides of what is before them."""
    lens = [(50, 50), (9, 40), (1, 30), (70, 200), (5, 60)]
    step = make_step(
        lens, head_dim=16, block_size=16, device=device, both_ways=(True, False, True, True, False)
    )
    attention = TritonAttention(split_tokens)
    got = attention(step.q, step.kv_layer, step.meta, 0.7, window, 0.0).cpu().double()
    torch.testing.assert_close(got, expected(step, 0.7, window, 0.0), atol=4e-6, rtol=1e-5)


@pytest.mark.parametrize("query_len", [1, 2, 40])
def test_a_long_context_is_split(device: torch.device, query_len: int) -> None:
    step = make_step([(query_len, 513)], heads=(2, 1), block_size=16, device=device)
    torch.testing.assert_close(attend(step, 0, 0.0), expected(step, 0.7, 0, 0.0), atol=4e-6, rtol=1e-5)


def _in_eight_bits(step: Step, dtype: torch.dtype) -> ScaledKV:
    """Round a step's keys and values, also those that are expected."""
    clean = step.kv_layer.nan_to_num()
    values, scales = rounded(clean.reshape(-1, clean.shape[-1]), dtype)
    layer = ScaledKV(values.view(clean.shape), scales.view(clean.shape[:-1]))
    read = layer.data.float() * layer.scales[..., None]
    for i, table in enumerate(step.meta.block_tables):
        planes = read[table.to(read.device)].cpu().permute(1, 0, 3, 2, 4).flatten(1, 2)
        step.keys[i], step.values[i] = planes[:, : step.meta.context_lens[i]]
    return layer


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int8])
@pytest.mark.parametrize(("window", "soft_cap"), [(0, 0.0), (9, 2.0)])
def test_quantised_cache_with_a_scale_for_each_vector(
    device: torch.device, dtype: torch.dtype, window: int, soft_cap: float
) -> None:
    step = make_step(LENS, head_dim=16, device=device)
    layer = _in_eight_bits(step, dtype)
    got = TritonAttention()(step.q, layer, step.meta, 0.7, window, soft_cap, None)
    want = expected(step, 0.7, window, soft_cap)
    torch.testing.assert_close(got.cpu().double(), want, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int8])
@pytest.mark.parametrize("size", [2e4, 1.0, 1e-3])
@pytest.mark.parametrize("query_dtype", [torch.bfloat16, torch.float16])
def test_eight_bits_with_half_precision(
    device: torch.device, dtype: torch.dtype, size: float, query_dtype: torch.dtype
) -> None:
    """Also where queries' products or values are not in float16's range, or at its edge."""
    step = make_step(LENS[:4], head_dim=24, device=device)
    step.kv_layer *= size
    step.q = (step.q * min(size * 1e3, 6e3)).to(query_dtype)
    layer = _in_eight_bits(step, dtype)
    scale = 0.2 / (size * min(size * 1e3, 6e3))
    got = TritonAttention()(step.q, layer, step.meta, scale, 0, 0.0)
    want = expected(step, scale, 0, 0.0)
    assert got.dtype == query_dtype
    tolerance = 1e-2 if query_dtype == torch.bfloat16 else 2e-3
    torch.testing.assert_close(got.cpu().double() / size, want / size, atol=tolerance, rtol=tolerance)


def test_a_neighbours_nan_stays_with_the_neighbour(device: torch.device) -> None:
    step = make_step([(1, 10), (1, 11), (6, 12)], device=device)
    clean = attend(step, 0, 0.0)
    step.kv_layer[step.meta.block_tables[1].to(device)] = torch.nan
    got = attend(step, 0, 0.0)
    assert got[1].isnan().all()
    torch.testing.assert_close(got[[0, 2, 3, 4, 5, 6, 7]], clean[[0, 2, 3, 4, 5, 6, 7]], rtol=0, atol=0)


def _part(step: Step, seq: int, start: int, stop: int) -> tuple[torch.Tensor, tuple[int, int], np.ndarray]:
    """Queries [start, stop) of a sequence: their rows, (query tokens, context tokens), and its block table."""
    first = step.meta.query_starts[seq]
    context = step.meta.context_lens[seq] - step.meta.query_lens[seq] + stop
    return step.q[first + start : first + stop], (stop - start, context), step.meta.block_tables[seq].numpy()


def _attend_parts(step: Step, parts: list[tuple[int, int, int]], window: int) -> list[torch.Tensor]:
    rows, lens, tables = zip(*(_part(step, *part) for part in parts), strict=True)
    slots = np.zeros(sum(query for query, _ in lens), np.int64)
    meta = AttentionMeta.build([q for q, _ in lens], [c for _, c in lens], tables, slots, step.q.device)
    attention = TritonAttention(split_tokens=64)
    got = attention(torch.cat(rows), step.kv_layer, meta, 0.7, window, 0.0)
    return list(got.split([query for query, _ in lens]))


@pytest.mark.parametrize("window", [0, 20])
def test_the_same_bits_however_a_prompt_is_chunked_and_whatever_it_is_batched_with(
    device: torch.device, window: int
) -> None:
    lens = [(1, 90), (20, 110), (1, 9), (3, 64)]
    step = make_step(lens, head_dim=16, device=device)
    whole = _attend_parts(step, [(seq, 0, query) for seq, (query, _) in enumerate(lens)], window)
    torch.testing.assert_close(
        torch.cat(whole).cpu().double(), expected(step, 0.7, window, 0.0), atol=4e-6, rtol=1e-5
    )
    need_equal_places()
    for cut in (3, 16):
        edges = sorted({0, *range(cut, 20, cut), 20})
        chunks = [_attend_parts(step, [(1, *pair)], window)[0] for pair in itertools.pairwise(edges)]
        assert torch.equal(torch.cat(chunks), whole[1])
    alone, between = (
        _attend_parts(step, [(0, 0, 1)], window)[0],
        _attend_parts(step, [(3, 0, 3), (0, 0, 1)], window)[1],
    )
    assert torch.equal(alone, whole[0])
    assert torch.equal(between, whole[0])
