"""Attention within chunks: a sequence's chunks, as sequences of their own, see what a mask over the whole would let them see."""

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

from kernels.attention.chunks import chunked
from kernels.ops import AttentionMeta
from kernels.select import select_ops

BLOCK, HEADS, KV_HEADS, DIM = 4, 4, 2, 8
CPU = torch.device("cpu")


def step_of(lens: list[tuple[int, int]], seed: int) -> tuple[AttentionMeta, torch.Tensor, list[torch.Tensor]]:
    """(query length, context length) each -> the step, a pool with NaN where no context is, and each one's block table."""
    rng = np.random.default_rng(seed)
    counts = [-(-context // BLOCK) for _, context in lens]
    ids = rng.permutation(sum(counts) + 2)
    tables = np.split(ids[: sum(counts)], np.cumsum(counts)[:-1])
    pool = torch.full((len(ids), 2, KV_HEADS, BLOCK, DIM), torch.nan)
    for (_, context), table in zip(lens, tables, strict=True):
        for token in range(context):
            pool[int(table[token // BLOCK]), :, :, token % BLOCK] = torch.from_numpy(
                rng.standard_normal((2, KV_HEADS, DIM))
            )
    slots = np.concatenate(
        [
            table[np.arange(context - query, context) // BLOCK] * BLOCK
            + np.arange(context - query, context) % BLOCK
            for (query, context), table in zip(lens, tables, strict=True)
        ]
    )
    meta = AttentionMeta.build(
        [query for query, _ in lens], [context for _, context in lens], tables, slots, CPU
    )
    return meta, pool, [torch.from_numpy(table) for table in tables]


def dense(q: torch.Tensor, pool: torch.Tensor, table: torch.Tensor, context: int, chunk: int) -> torch.Tensor:
    """(Q, H, D) -> the same by PyTorch's attention, under a mask over all of the context."""
    keys, values = pool[table].permute(1, 2, 0, 3, 4).flatten(2, 3)[:, :, :context]
    at, key = torch.arange(context - len(q), context)[:, None], torch.arange(context)
    seen = (key <= at) & (key // chunk == at // chunk)
    out = F.scaled_dot_product_attention(
        q.transpose(0, 1)[None], keys[None], values[None], attn_mask=seen, scale=0.3, enable_gqa=True
    )
    return out[0].transpose(0, 1)


@given(
    st.lists(st.tuples(st.integers(1, 40), st.integers(0, 40)), min_size=1, max_size=5),
    st.integers(1, 6),
    st.integers(0, 99),
)
@settings(max_examples=40)
def test_each_token_sees_its_own_chunk_up_to_itself(
    parts: list[tuple[int, int]], blocks: int, seed: int
) -> None:
    lens = [(query, query + before) for query, before in parts]
    chunk = blocks * BLOCK
    meta, pool, tables = step_of(lens, seed)
    q = torch.randn(
        sum(query for query, _ in lens), HEADS, DIM, generator=torch.Generator().manual_seed(seed)
    )
    ops = select_ops(CPU, "auto", False, (), "float32", "full")
    got = ops.paged_attention(q, pool, chunked(meta, chunk, BLOCK), 0.3, 0, 0.0, None)
    want = [
        dense(rows, pool, table, context, chunk)
        for rows, table, (_, context) in zip(q.split([query for query, _ in lens]), tables, lens, strict=True)
    ]
    torch.testing.assert_close(got, torch.cat(want), atol=1e-5, rtol=1e-5)


def test_a_step_is_cut_once_for_all_layers() -> None:
    meta, _, _ = step_of([(10, 30)], 0)
    assert chunked(meta, 8, BLOCK) is chunked(meta, 8, BLOCK)
    assert chunked(meta, 8, BLOCK).query_lens == (4, 6)
    assert chunked(meta, 16, BLOCK).context_lens == (14,)
