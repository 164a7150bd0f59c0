"""Latent attention against its definition in float64: every head's keys and values written out."""

import math

import numpy as np
import pytest
import torch

from core.kv import KVLayout, KVShard
from kernels.ops import AttentionMeta
from kernels.select import select_ops
from kernels.torch.latent_attention import expanding_pays

CPU = torch.device("cpu")
BLOCK, RANK, ROTATED, NOPE, VALUE = 4, 16, 8, 12, 10


def attention(
    lens: list[tuple[int, int]], dtype: torch.dtype, num_heads: int, deterministic: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """What the operation says, and what the definition says, of (query tokens, context tokens) sequences."""
    torch.manual_seed(len(lens))
    counts = [-(-context // BLOCK) for _, context in lens]
    order = np.random.default_rng(0).permutation(sum(counts) + 2).astype(np.int64)
    ends = np.cumsum(counts)
    tables = [order[end - count : end] for end, count in zip(ends, counts, strict=True)]
    kv_layer = torch.full((len(order), 1, 1, BLOCK, RANK + ROTATED), torch.nan, dtype=dtype)
    latents = [torch.randn(context, RANK + ROTATED, dtype=dtype) for _, context in lens]
    for table, latent in zip(tables, latents, strict=True):
        for token, vector in enumerate(latent):
            kv_layer[table[token // BLOCK], 0, 0, token % BLOCK] = vector
    num_rows = sum(query for query, _ in lens)
    meta = AttentionMeta.build(
        [query for query, _ in lens],
        [context for _, context in lens],
        tables,
        np.zeros(num_rows, np.int64),
        CPU,
    )
    q = torch.randn(num_rows, num_heads, NOPE + ROTATED, dtype=dtype)
    k_up = torch.randn(num_heads, NOPE, RANK, dtype=dtype) / 4
    v_up = torch.randn(num_heads, VALUE, RANK, dtype=dtype) / 4
    got = select_ops(CPU, deterministic=deterministic).latent_attention(q, kv_layer, meta, 0.3, k_up, v_up)
    want = []
    for (query, context), latent in zip(lens, latents, strict=True):
        keys = torch.einsum("lr,hnr->lhn", latent[:, :RANK].double(), k_up.double())
        shared = latent[:, None, RANK:].double().expand(-1, num_heads, -1)
        keys = torch.cat((keys, shared), -1)
        values = torch.einsum("lr,hvr->lhv", latent[:, :RANK].double(), v_up.double())
        for token in range(context - query, context):
            row = q[len(want)].double()
            scores = torch.einsum("hd,lhd->hl", row, keys[: token + 1]) * 0.3
            want.append(torch.einsum("hl,lhv->hv", scores.softmax(-1), values[: token + 1]))
    return got, torch.stack(want)


@pytest.mark.parametrize(
    "lens",
    [[(1, 1), (1, 33), (5, 5), (3, 70)], [(150, 150)], [(90, 201), (1, 8), (65, 66)]],
    ids=["absorbed", "expanded", "both"],
)
@pytest.mark.parametrize("num_heads", [1, 3, 20])
def test_either_way_is_the_definition(lens: list[tuple[int, int]], num_heads: int) -> None:
    got, want = attention(lens, torch.float32, num_heads)
    torch.testing.assert_close(got.double(), want, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sixteen_bits(dtype: torch.dtype) -> None:
    got, want = attention([(1, 40), (80, 90)], dtype, 4)
    assert got.dtype == dtype
    torch.testing.assert_close(got.double(), want, atol=5e-2, rtol=5e-2)


def test_decoding_absorbs_and_long_prefill_expands() -> None:
    k_up, v_up = torch.empty(2, NOPE, RANK), torch.empty(2, VALUE, RANK)
    assert [expanding_pays(n, NOPE + ROTATED, k_up, v_up) for n in (1, 8, 64, 2048)] == [
        False,
        False,
        True,
        True,
    ]
    k_up, v_up = (torch.empty(128, 128, 512, device="meta") for _ in range(2))
    border = math.ceil(512 * 256 / (576 + 512 - 192 - 128) + 1e-9)
    assert [expanding_pays(n, 192, k_up, v_up) for n in (border - 1, border)] == [False, True]


def test_latents_are_put_where_core_kv_says() -> None:
    shard = KVShard.whole(
        KVLayout(
            num_layers=2,
            num_kv_heads=1,
            head_dim=RANK + ROTATED,
            block_size=BLOCK,
            dtype="float32",
            state="mla",
        )
    )
    pool = torch.zeros(2, 5, 1, 1, BLOCK, RANK + ROTATED)
    slots = np.array([17, 3, 8])
    latent = torch.randn(3, RANK + ROTATED)
    meta = AttentionMeta.build([3], [3], [np.array([0])], slots, CPU)
    select_ops(CPU).write_latent(latent, pool[1], meta)
    want = torch.zeros(pool.numel())
    for row, slot in enumerate(slots.tolist()):
        at = shard.offset(5, 1, slot // BLOCK, 0, 0, slot % BLOCK) // 4
        want[at : at + RANK + ROTATED] = latent[row]
    torch.testing.assert_close(pool.flatten(), want, rtol=0, atol=0)
