"""The choice of the tokens that a query attends to, and attention to them, over a paged cache of latents with index keys behind
them (arXiv:2512.02556, section 2.1).

Scores are memory-bound in decode. Floor: the index keys of every context are read once. Attention then reads as many latents for
each query, through a table of their slots, as though each were a block of one token."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
import triton.language as tl
from torch import Tensor

from kernels.ops import AttentionMeta, Latents
from kernels.torch.token_index import highest
from kernels.triton.attention_config import block_table
from kernels.triton.gemm import batched_linear
from kernels.triton.latent import absorbed_attention
from kernels.triton.latent_tiles import StoredLatents, by_slot, scaled
from kernels.triton.launching import launchable
from kernels.triton.platform import INTERPRETED, cdiv, dot_dtype, next_power_of_2
from kernels.triton.tiles import uploaded

_BLOCK_N = 16 if INTERPRETED else 64
MOST_SCORES = 1 << 24
"""Scores that exist at one time, unless one query has more. Choosing by them takes some five times their bytes."""


@launchable(do_not_specialize=["table_stride", "out_stride"])
def _scores_kernel(
    q, weights, kv, kv_scales, out, rows, table, table_stride, out_stride,
    HEADS: tl.constexpr, SIZE: tl.constexpr, STRIDE: tl.constexpr, BEHIND: tl.constexpr, BLOCK_J: tl.constexpr,
    BLOCK_I: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCK_N: tl.constexpr, DOT: tl.constexpr,
    STORED: tl.constexpr, EACH: tl.constexpr, SCALES: tl.constexpr,
):  # fmt: skip
    """Program (query, BLOCK_N tokens). What is behind the query's own token is left as it is. The last three: see
    latent_tiles; STORED is None where keys are floats."""
    row, start = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK_N
    seq, position = tl.load(rows + row * 2), tl.load(rows + row * 2 + 1)
    if start > position:
        return
    head, column = tl.arange(0, BLOCK_J), tl.arange(0, BLOCK_I)
    at = start + tl.arange(0, BLOCK_N)
    there = at <= position
    block = tl.load(table + seq.to(tl.int64) * table_stride + at // BLOCK_SIZE, there, 0).to(tl.int64)
    place, is_key = block * BLOCK_SIZE + at % BLOCK_SIZE, there[:, None] & (column < SIZE)[None, :]
    keys = tl.load(kv + place[:, None] * STRIDE + BEHIND + column[None, :], is_key, 0)
    if STORED is not None:
        keys = scaled(keys, kv_scales, place, there, SCALES * EACH - SIZE + column, STORED, EACH, SCALES)
    keys = keys.to(DOT)
    mask = (head < HEADS)[:, None] & (column < SIZE)[None, :]
    queries = tl.load(q + (row * HEADS + head)[:, None] * SIZE + column[None, :], mask, 0.0).to(DOT)
    weight = tl.load(weights + row * HEADS + head, head < HEADS, 0.0)
    products = tl.dot(queries, tl.trans(keys), input_precision="ieee")
    scores = tl.sum(tl.maximum(products, 0.0) * weight[:, None], 0)
    tl.store(out + row * out_stride + at, scores, there)


@dataclass(frozen=True, slots=True)
class _Rows:
    """A step's queries."""

    positions: np.ndarray
    """(T,) int32, for the host."""
    rows: Tensor
    """(T, 2) int32: the sequence of each, and its position."""
    table: Tensor
    """(sequences, widest) int32 block ids."""


def select_tokens(q: Tensor, weights: Tensor, kv_layer: Latents, meta: AttentionMeta, top_k: int) -> Tensor:
    """`Ops.select_tokens`. A score has the same bits in any batch."""
    q, weights, block_size = q.contiguous(), weights.contiguous(), kv_layer.shape[3]
    step = _rows_of(meta, block_size, q.device)
    found = torch.empty((len(q), top_k), dtype=torch.int64, device=q.device)
    for part, seen in _parts(step.positions):
        scores = index_scores(q[part], weights[part], kv_layer, step.rows[part], step.table, seen)
        tokens, seqs = highest(scores, top_k), step.rows[part, 0].long()
        blocks = step.table[seqs[:, None], tokens // block_size]
        found[part] = blocks.long() * block_size + tokens % block_size
    return found


def index_scores(
    q: Tensor, weights: Tensor, kv_layer: Latents, rows: Tensor, table: Tensor, num_tokens: int
) -> Tensor:
    """(t, J, I), (t, J) float32, (t, 2) int32 of `_Rows` -> (t, num_tokens) float32, -inf for what a query does not see."""
    latents = StoredLatents.of(kv_layer)
    num_rows, num_heads, size = q.shape
    out = torch.full((num_rows, num_tokens), -torch.inf, dtype=torch.float32, device=q.device)
    _scores_kernel[num_rows, cdiv(num_tokens, _BLOCK_N)](
        q, weights, latents.numbers, latents.scales, out, rows, table, table.stride(0), num_tokens,
        HEADS=num_heads, SIZE=size, STRIDE=latents.stride, BEHIND=latents.size - size,
        BLOCK_J=max(16, next_power_of_2(num_heads)), BLOCK_I=max(16, next_power_of_2(size)),
        BLOCK_SIZE=kv_layer.shape[3], BLOCK_N=_BLOCK_N, DOT=dot_dtype(q.dtype),
        STORED=latents.stored, EACH=latents.each, SCALES=latents.num_scales,
    )  # fmt: skip
    return out


def selected_attention(
    q: Tensor, kv_layer: Latents, slots: Tensor, meta: AttentionMeta, scale: float, k_up: Tensor, v_up: Tensor
) -> Tensor:
    """`Ops.selected_attention`."""
    nope, rank = k_up.shape[1:]
    queries = torch.cat((torch.einsum("thn,hnr->thr", q[..., :nope], k_up), q[..., nope:]), -1)
    return torch.einsum("thr,hvr->thv", _attended(queries, kv_layer, slots, meta, scale, rank), v_up)


def invariant_selected_attention(
    q: Tensor, kv_layer: Latents, slots: Tensor, meta: AttentionMeta, scale: float, k_up: Tensor, v_up: Tensor,
    split_tokens: int,
) -> Tensor:  # fmt: skip
    """The same with the same bits for a token in any batch."""
    nope, rank = k_up.shape[1:]
    queries = torch.cat((batched_linear(q[..., :nope], k_up.mT), q[..., nope:]), -1)
    return batched_linear(_attended(queries, kv_layer, slots, meta, scale, rank, split_tokens), v_up)


def _attended(
    queries: Tensor, kv_layer: Latents, slots: Tensor, meta: AttentionMeta, scale: float, rank: int,
    split_tokens: int = 0,
) -> Tensor:  # fmt: skip
    """(T, H, R + P) -> (T, H, R). Each query is a sequence of its own, whose blocks are the slots, a token in each."""
    num_rows, count = slots.shape
    key = ("queries of chosen tokens", count)
    if (alone := meta.cache.get(key)) is None:
        alone = AttentionMeta.over((1,) * num_rows, (count,) * num_rows, (), meta.slots)
        meta.cache[key] = alone
    table = slots.to(torch.int32)
    return absorbed_attention(queries, by_slot(kv_layer), alone, scale, rank, split_tokens, table=table)


def _rows_of(meta: AttentionMeta, block_size: int, device: torch.device) -> _Rows:
    """Return what `meta.cache` keeps: it is the same in all layers."""
    key = ("queries of index keys", block_size)
    if (found := meta.cache.get(key)) is None:
        lens = list(zip(meta.query_lens, meta.context_lens, strict=True))
        positions = np.concatenate(
            [np.arange(context - query, context, dtype=np.int32) for query, context in lens]
        )
        seqs = np.repeat(np.arange(len(lens), dtype=np.int32), meta.query_lens)
        rows, table = uploaded([np.stack((seqs, positions), 1), block_table(meta, block_size)], device)
        found = meta.cache[key] = _Rows(positions, rows, table)
    return found


def _parts(positions: np.ndarray) -> Iterator[tuple[slice, int]]:
    """Yield runs of queries whose scores may exist at one time, and how many tokens the run sees."""
    start = 0
    while start < len(positions):
        longest = np.maximum.accumulate(positions[start:]) + 1
        fits = longest.astype(np.int64) * np.arange(1, len(longest) + 1) <= MOST_SCORES
        count = max(1, int(fits.sum()))
        yield slice(start, start + count), int(longest[count - 1])
        start += count
