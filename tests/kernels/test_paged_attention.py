"""Paged attention against its definition: for each query a softmax over what it may see, in float64."""

import random
from dataclasses import dataclass

import numpy as np
import pytest
import torch

from kernels.ops import AttentionMeta
from kernels.select import select_ops

CPU = torch.device("cpu")
HEADS = {"grouped": (6, 2), "single": (1, 1), "equal": (3, 3), "one_kv_head": (4, 1)}


@dataclass
class Step:
    """Sequences of (query tokens, context tokens) with random Q, K and V in a pool that is NaN elsewhere."""

    q: torch.Tensor
    kv_layer: torch.Tensor
    meta: AttentionMeta
    keys: list[torch.Tensor]
    values: list[torch.Tensor]


def make_step(
    lens: list[tuple[int, int]], *, heads: tuple[int, int] = (4, 2), head_dim: int = 8, block_size: int = 4,
    dtype: torch.dtype = torch.float32, seed: int = 0,
) -> Step:  # fmt: skip
    torch.manual_seed(seed)
    num_heads, num_kv_heads = heads
    counts = [-(-context // block_size) for _, context in lens]
    order = np.random.default_rng(seed).permutation(sum(counts) + 3).astype(np.int64)
    ends = np.cumsum(counts)
    tables = [order[end - count : end] for end, count in zip(ends, counts, strict=True)]
    kv_layer = torch.full((len(order), 2, num_kv_heads, block_size, head_dim), torch.nan, dtype=dtype)
    keys = [torch.randn(context, num_kv_heads, head_dim, dtype=dtype) for _, context in lens]
    values = [torch.randn(context, num_kv_heads, head_dim, dtype=dtype) for _, context in lens]
    for table, k, v in zip(tables, keys, values, strict=True):
        for token in range(len(k)):
            kv_layer[table[token // block_size], 0, :, token % block_size] = k[token]
            kv_layer[table[token // block_size], 1, :, token % block_size] = v[token]
    meta = AttentionMeta.build(
        [query for query, _ in lens],
        [context for _, context in lens],
        tables,
        np.zeros(sum(query for query, _ in lens), np.int64),
        CPU,
    )
    q = torch.randn(sum(query for query, _ in lens), num_heads, head_dim, dtype=dtype)
    return Step(q, kv_layer, meta, keys, values)


def expected(
    step: Step, scale: float, window: int, soft_cap: float, sinks: torch.Tensor | None = None
) -> torch.Tensor:
    out = []
    row = 0
    for query_len, k, v in zip(step.meta.query_lens, step.keys, step.values, strict=True):
        repeats = step.q.shape[1] // k.shape[1]
        k, v = (x.double().repeat_interleave(repeats, 1) for x in (k, v))
        for i in range(query_len):
            end = len(k) - query_len + i + 1
            first = max(0, end - window) if window else 0
            scores = torch.einsum("hd,lhd->hl", step.q[row].double(), k[first:end]) * scale
            if soft_cap:
                scores = soft_cap * torch.tanh(scores / soft_cap)
            if sinks is not None:
                scores = torch.cat((scores, sinks.double()[:, None]), -1)
            weights = scores.softmax(-1)[:, : end - first]
            out.append(torch.einsum("hl,lhd->hd", weights, v[first:end]))
            row += 1
    return torch.stack(out)


@torch.inference_mode()
def attend(
    step: Step, scale: float, window: int, soft_cap: float, sinks: torch.Tensor | None = None
) -> torch.Tensor:
    return select_ops(CPU).paged_attention(step.q, step.kv_layer, step.meta, scale, window, soft_cap, sinks)


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


def test_more_decoding_sequences_than_are_gathered_at_once() -> None:
    lens = [(1, context) for context in (33, 700, 1, 512, 90, 300, 640, 64, 65, 15)]
    step = make_step(lens, heads=(8, 8), head_dim=64, block_size=16)
    got = attend(step, 0.1, 0, 0.0)
    torch.testing.assert_close(got.double(), expected(step, 0.1, 0, 0.0), atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("soft_cap", [0.0, 2.0])
def test_bfloat16(soft_cap: float) -> None:
    step = make_step([(1, 40), (9, 30), (1, 3)], dtype=torch.bfloat16)
    got = attend(step, 0.3, 11, soft_cap)
    assert got.dtype == torch.bfloat16
    torch.testing.assert_close(got.double(), expected(step, 0.3, 11, soft_cap), atol=3e-2, rtol=3e-2)


@torch.inference_mode()
def test_layers_of_different_windows_share_a_step_and_steps_share_an_object() -> None:
    ops = select_ops(CPU)
    for seed, lens in enumerate(([(1, 50), (20, 60)], [(1, 9), (1, 130)], [(3, 3), (1, 70)])):
        step = make_step(lens, seed=seed)
        half = make_step(lens, seed=seed, dtype=torch.bfloat16)
        ops.paged_attention(half.q, half.kv_layer, half.meta, 0.5, 0, 0.0, None)
        for window in (0, 6, 0, 30):
            got = ops.paged_attention(step.q, step.kv_layer, step.meta, 0.5, window, 0.0, None)
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
