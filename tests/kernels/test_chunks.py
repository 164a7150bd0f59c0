"""Attention within chunks: a sequence's chunks, as sequences of their own, see what a mask over the whole would let them see."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

from kernels.attention.chunks import chunked
from kernels.select import select_ops
from tests.kernels.paged_step import make_step

BLOCK = 4
CPU = torch.device("cpu")


def dense(q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, chunk: int) -> torch.Tensor:
    """(Q, H, D) x (context, Hkv, D) -> the same by PyTorch's attention, under a mask over all of the context."""
    at, key = torch.arange(len(keys) - len(q), len(keys))[:, None], torch.arange(len(keys))
    seen = (key <= at) & (key // chunk == at // chunk)
    query, keys, values = (part.transpose(0, 1)[None] for part in (q, keys, values))
    out = F.scaled_dot_product_attention(query, keys, values, attn_mask=seen, scale=0.3, enable_gqa=True)
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
    chunk = blocks * BLOCK
    step = make_step([(query, query + before) for query, before in parts], block_size=BLOCK, seed=seed)
    ops = select_ops(CPU, "auto", (), "float32", "full", deterministic=False)
    meta = chunked(step.meta, chunk, BLOCK)
    got = ops.paged_attention(step.q, step.kv_layer, meta, 0.3, 0, 0.0, None)
    queries = step.q.split([query for query, _ in parts])
    want = [dense(*each, chunk) for each in zip(queries, step.keys, step.values, strict=True)]
    torch.testing.assert_close(got, torch.cat(want), atol=1e-5, rtol=1e-5)


def test_a_step_is_cut_once_for_all_layers() -> None:
    meta = make_step([(10, 30)], block_size=BLOCK).meta
    assert chunked(meta, 8, BLOCK) is chunked(meta, 8, BLOCK)
    assert chunked(meta, 8, BLOCK).query_lens == (4, 6)
    assert chunked(meta, 16, BLOCK).context_lens == (14,)
