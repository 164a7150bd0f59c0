"""Attention over a paged KV cache: prefill, decode and anything between as one family over tiles of query rows.

After FlashAttention-2 (Dao, 2023); queries of the heads that share a KV head are packed into one tile, and long contexts are
split among programs whose partial results are reduced behind (Flash-Decoding, Dao et al., 2023). Decode is memory-bound; floor:
K and V of every context are read once. Prefill is compute-bound; floor: 4 D flops for each head and visible pair."""

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from kernels.ops import AttentionMeta, KVLayer
from kernels.triton.attention_config import AttentionShape, ContextPart, plan
from kernels.triton.attention_reduce import Partials, reduce_splits
from kernels.triton.launching import launchable
from kernels.triton.platform import dot_dtype, parts_of
from kernels.triton.softmax import online_softmax, soft_capped, with_sink
from kernels.triton.tiles import item_of, rows_of

_LOG2E = 1.4426950408889634


@triton.jit
def _places_of(start, COUNT: tl.constexpr, BLOCK_SIZE: tl.constexpr):
    """COUNT tokens from `start` on -> numbers of their blocks in the sequence, and their places in those. Of a multiple of whole
    blocks, which then begins where a block does, the places are the same for any `start`."""
    token = tl.arange(0, COUNT)
    if COUNT % BLOCK_SIZE == 0:
        return start // BLOCK_SIZE + token // BLOCK_SIZE, token % BLOCK_SIZE
    token += start
    return token // BLOCK_SIZE, token % BLOCK_SIZE


@triton.jit
def _load_vectors(
    kv, kv_scales, block, place, plane, kv_head, column, exists,
    KV_HEADS: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    MASKED: tl.constexpr, SCALED: tl.constexpr,
):  # fmt: skip
    """(N, BLOCK_D) vectors of plane 0 (keys) or 1 (values), and their (N,) scales."""
    in_block = (plane * KV_HEADS + kv_head) * BLOCK_SIZE + place
    begins = block * (2 * KV_HEADS * BLOCK_SIZE)
    pointers = kv + (in_block * D)[:, None] + column[None, :] + (begins * D)[:, None]
    if MASKED:
        vectors = tl.load(pointers, exists[:, None] & (column < D)[None, :], 0.0)
    elif D < BLOCK_D:
        vectors = tl.load(pointers, (column < D)[None, :], 0.0)
    else:
        vectors = tl.load(pointers)
    scales = exists.to(tl.float32)
    if SCALED:
        scales = tl.load(kv_scales + begins + in_block, exists, 0.0)
    return vectors, scales


@triton.jit
def _attend_span(
    acc, largest, total, q, kv, kv_scales, table, begin, end, position, last, kv_head, scale_log2, soft_cap,
    KV_HEADS: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    WINDOW: tl.constexpr, CAPPED: tl.constexpr, SCALED: tl.constexpr, MASKED: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """Attend to tokens [begin, end); `position` (M,) is each row's own, `last` (M,) what it sees up to. Not MASKED: all rows see
    all of them."""
    column = tl.arange(0, BLOCK_D)
    for start in tl.range(begin, end, BLOCK_N):
        token = start + tl.arange(0, BLOCK_N)
        exists = token < end
        number, place = _places_of(start, BLOCK_N, BLOCK_SIZE)
        if MASKED:
            block = tl.load(table + number, exists, 0).to(tl.int64)
        else:
            block = tl.load(table + number).to(tl.int64)
        k, k_scale = _load_vectors(
            kv, kv_scales, block, place, 0, kv_head, column, exists, KV_HEADS, D, BLOCK_D, BLOCK_SIZE, MASKED, SCALED
        )  # fmt: skip
        scores = tl.dot(q, tl.trans(k.to(DOT)), input_precision="ieee")
        if SCALED:
            scores *= k_scale[None, :]
        scores, unit = soft_capped(scores, scale_log2, soft_cap, CAPPED)
        if MASKED:
            visible = (token[None, :] <= last[:, None]) & exists[None, :]
            if WINDOW > 0:
                visible = visible & (token[None, :] > position[:, None] - WINDOW)
            scores = tl.where(visible, scores, float("-inf"))
        weights, factor, largest, total = online_softmax(scores, unit, largest, total)
        v, v_scale = _load_vectors(
            kv, kv_scales, block, place, 1, kv_head, column, exists, KV_HEADS, D, BLOCK_D, BLOCK_SIZE, MASKED, SCALED
        )  # fmt: skip
        if SCALED:
            weights *= v_scale[None, :]
        acc = tl.dot(weights.to(DOT), v.to(DOT), acc * factor[:, None], input_precision="ieee")
    return acc, largest, total


@launchable(do_not_specialize=["split_tokens", "table_stride"])
def _attention_kernel(
    q, kv, kv_scales, sinks, out, partial, partial_stats, tile_seqs, tile_tokens, starts, query_lens, context_lens, both_ways,
    table, items, item_splits, scale_log2, soft_cap, split_tokens, table_stride, q_token_stride,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, HEADS: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, WINDOW: tl.constexpr, CAPPED: tl.constexpr,
    SCALED: tl.constexpr, SINKS: tl.constexpr, SPLIT: tl.constexpr, FIXED: tl.constexpr, ABSOLUTE: tl.constexpr,
    DOT: tl.constexpr,
):  # fmt: skip
    """Programs: see tiles.item_of. SPLIT: unnormalised results go to `partial`, to be reduced."""
    head_block = tl.program_id(1)
    item, tile, split, tokens = item_of(items, item_splits, split_tokens, FIXED)
    if FIXED:
        if tile < 0:
            return
    seq, first = tl.load(tile_seqs + tile), tl.load(tile_tokens + tile)
    query_len, context_len = tl.load(query_lens + seq), tl.load(context_lens + seq)
    token, head, exists = rows_of(first, query_len, head_block, GROUP, HEADS, tl.arange(0, BLOCK_M), BLOCK_M)
    position = context_len - query_len + token
    first_position = context_len - query_len + first
    end = min(first_position + BLOCK_M // HEADS, context_len)
    last = position
    if both_ways is not None:
        sees_all = tl.load(both_ways + seq) != 0
        end = tl.where(sees_all, context_len, end)
        last = tl.where(sees_all, context_len - 1, position)
    begin = 0
    if WINDOW > 0:
        begin = max(first_position - WINDOW + 1, 0) // BLOCK_N * BLOCK_N
    if SPLIT:
        base = 0 if ABSOLUTE else begin
        end = min(end, base + (split + 1) * tokens)
        begin = max(begin, base + split * tokens)

    column = tl.arange(0, BLOCK_D)
    row = (tl.load(starts + seq) + token).to(tl.int64)
    mask = exists[:, None] & (column < D)[None, :]
    queries = tl.load(q + row[:, None] * q_token_stride + head[:, None] * D + column[None, :], mask, 0.0).to(
        DOT
    )
    acc = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    largest = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    kv_head = head_block // ((GROUP + HEADS - 1) // HEADS)
    blocks = table + seq.to(tl.int64) * table_stride
    edge = begin
    if WINDOW == 0 and not ABSOLUTE:
        # All rows see what is not behind the first one's position. Compiled apart, the same arithmetic may round otherwise.
        edge = max(begin, begin + (min(first_position + 1, end) - begin) // BLOCK_N * BLOCK_N)
        acc, largest, total = _attend_span(
            acc, largest, total, queries, kv, kv_scales, blocks, begin, edge, position, last, kv_head, scale_log2, soft_cap,
            KV_HEADS, D, BLOCK_D, BLOCK_N, BLOCK_SIZE, WINDOW, CAPPED, SCALED, False, DOT,
        )  # fmt: skip
    acc, largest, total = _attend_span(
        acc, largest, total, queries, kv, kv_scales, blocks, edge, end, position, last, kv_head, scale_log2, soft_cap,
        KV_HEADS, D, BLOCK_D, BLOCK_N, BLOCK_SIZE, WINDOW, CAPPED, SCALED, True, DOT,
    )  # fmt: skip
    if SPLIT:
        at = (item.to(tl.int64) * tl.num_programs(1) + head_block) * BLOCK_M + tl.arange(0, BLOCK_M)
        tl.store(partial + at[:, None] * D + column[None, :], acc, mask)
        tl.store(partial_stats + at * 2, largest, exists)
        tl.store(partial_stats + at * 2 + 1, total, exists)
    else:
        factor, total = with_sink(largest, total, sinks, head, exists, SINKS)
        acc = acc * (factor / total)[:, None]
        target = out + (row[:, None] * (KV_HEADS * GROUP) + head[:, None]) * D + column[None, :]
        tl.store(target, acc.to(out.dtype.element_ty), mask)


@dataclass(frozen=True, slots=True)
class TritonAttention:
    """`Ops.paged_attention`. `split_tokens` > 0: the same bits for a token whatever it is batched with and however its prompt is
    chunked: one tile shape for all, contexts split at its multiples, at the cost of tiles too large for decode."""

    split_tokens: int = 0

    def __call__(
        self, q: Tensor, kv_layer: KVLayer, meta: AttentionMeta, scale: float, window: int, soft_cap: float,
        sinks: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        out = q.new_empty(q.shape)
        data, scales = parts_of(kv_layer)
        _, _, kv_heads, block_size, size = kv_layer.shape
        shape = AttentionShape(
            num_heads=q.shape[1],
            num_kv_heads=kv_heads,
            head_dim=size,
            block_size=block_size,
            dtype=q.dtype,
            quantised=scales is not None,
            split_tokens=self.split_tokens,
        )
        for part in plan(meta, shape, window, q.device):
            _attend(part, shape, q, data, scales, out, scale, window, soft_cap, sinks)
        return out


def _attend(
    part: ContextPart, shape: AttentionShape, q: Tensor, kv_layer: Tensor, kv_scales: Tensor | None, out: Tensor,
    scale: float, window: int, soft_cap: float, sinks: Tensor | None,
) -> None:  # fmt: skip
    tiles, config, items = part.tiles, part.config, part.items
    head_blocks, size = config.num_head_blocks(shape), shape.head_dim
    partials = None
    if part.in_parts:
        partials = Partials.empty(part.num_items, head_blocks, config.block_m, size, q.device)
    _attention_kernel[part.grid(head_blocks)](
        q, kv_layer, kv_scales, sinks, out, partials and partials.values, partials and partials.stats,
        tiles.tile_seqs, tiles.tile_tokens, tiles.starts, tiles.query_lens, tiles.context_lens, tiles.both_ways, tiles.table,
        items and items.tiles, items and items.splits, scale * _LOG2E, soft_cap,
        items.split_tokens if items else part.split_tokens, tiles.table.stride(0), q.stride(0),
        KV_HEADS=shape.num_kv_heads, GROUP=shape.group, HEADS=config.heads, D=size,
        BLOCK_D=max(16, triton.next_power_of_2(size)), BLOCK_SIZE=shape.block_size,
        BLOCK_M=config.block_m, BLOCK_N=config.block_n, WINDOW=window, CAPPED=soft_cap > 0,
        SCALED=kv_scales is not None, SINKS=sinks is not None, SPLIT=part.in_parts, FIXED=items is not None,
        ABSOLUTE=shape.split_tokens > 0, DOT=dot_dtype(q.dtype), num_warps=config.num_warps, num_stages=config.num_stages,
    )  # fmt: skip
    if partials is not None:
        reduce_splits(partials, tiles, items, sinks, out, shape.num_kv_heads, config.heads)
