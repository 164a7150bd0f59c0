"""Attention over a paged KV cache: prefill, decode and anything between as one family over tiles of query rows.

After FlashAttention-2 (Dao, 2023); queries of the heads that share a KV head are packed into one tile, and long contexts are
split among programs whose partial results are reduced behind (Flash-Decoding, Dao et al., 2023). Decode is memory-bound; floor:
K and V of every context are read once. Prefill is compute-bound; floor: 4 D flops for each head and visible pair."""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.head_places import HeadPlaces
from kernels.ops import AttentionMeta, KVLayer
from kernels.triton.attention_config import AttentionShape, LaunchPart, plan
from kernels.triton.attention_reduce import Partials, reduce_splits
from kernels.triton.eight_bits import STORED_DTYPES, WEIGHTS_FACTOR, halves, in_range
from kernels.triton.launching import await_inputs, launchable
from kernels.triton.platform import dot_dtype, next_power_of_2, parts_of, places_in
from kernels.triton.softmax import online_softmax, soft_capped, with_sink
from kernels.triton.tiles import item_of, result_of, rows_of

_LOG2E = 1.4426950408889634


@triton.jit
def _places_of(start, COUNT: tl.constexpr, BLOCK_SIZE: tl.constexpr, ROWS: tl.constexpr):
    """COUNT tokens from `start` on -> numbers of their blocks in the sequence, and their places in those. Of a multiple of whole
    blocks, which then begins where a block does, the places are the same for any `start`: addresses are kept in registers then,
    but for few rows, where programs are many and registers decide how many run."""
    token = tl.arange(0, COUNT)
    if COUNT % BLOCK_SIZE == 0 and ROWS > 16:
        return start // BLOCK_SIZE + token // BLOCK_SIZE, token % BLOCK_SIZE
    token += start
    return token // BLOCK_SIZE, token % BLOCK_SIZE


@triton.jit
def _load_vectors(
    kv, kv_scales, block, place, plane, kv_head, column, exists,
    POOL_HEADS: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    MASKED: tl.constexpr, SCALED: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """(N, BLOCK_D) of plane 0 (keys) or 1 (values), D of each vector, and the vectors' (N,) scales. `kv_head` is the pool's;
    WIDTH neighbouring heads of it have a piece of a vector each."""
    in_block = (plane * POOL_HEADS + kv_head) * BLOCK_SIZE + place
    PIECE: tl.constexpr = D // WIDTH
    begins = block * (2 * POOL_HEADS * BLOCK_SIZE)
    in_vector = column
    if WIDTH > 1:
        in_vector = column // PIECE * (BLOCK_SIZE * PIECE) + column % PIECE
    pointers = kv + (in_block * PIECE)[:, None] + in_vector[None, :] + (begins * PIECE)[:, None]
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
    acc, acc_odd, largest, total, q, q_odd, q_size, kv, kv_scales, table, begin, end, position, last, kv_head, scale_log2,
    soft_cap, POOL_HEADS: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    WINDOW: tl.constexpr, CAPPED: tl.constexpr, STORED: tl.constexpr, MASKED: tl.constexpr, DOT: tl.constexpr,
    WIDTH: tl.constexpr,
):  # fmt: skip
    """Attend to tokens [begin, end); `position` (M,) is each row's own, `last` (M,) what it sees up to. Not MASKED: all rows see
    all of them. STORED: see `eight_bits.halves`; `q_odd` and `acc_odd` are of the odd columns then, and
    a row's scores are to be multiplied with its `q_size` (M,)."""
    column = tl.arange(0, BLOCK_D)
    SCALED: tl.constexpr = STORED is not None
    for start in tl.range(begin, end, BLOCK_N):
        token = start + tl.arange(0, BLOCK_N)
        exists = token < end
        number, place = _places_of(start, BLOCK_N, BLOCK_SIZE, q.shape[0])
        if MASKED:
            block = tl.load(table + number, exists, 0).to(tl.int64)
        else:
            block = tl.load(table + number).to(tl.int64)
        k, k_scale = _load_vectors(
            kv, kv_scales, block, place, 0, kv_head, column, exists, POOL_HEADS, D, BLOCK_D, BLOCK_SIZE, MASKED, SCALED, WIDTH
        )  # fmt: skip
        if SCALED:
            even, odd = halves(k, STORED, DOT)
            scores = tl.dot(q, tl.trans(even), input_precision="ieee")
            scores = tl.dot(q_odd, tl.trans(odd), scores, input_precision="ieee")
            scores *= k_scale[None, :] * q_size[:, None]
        else:
            scores = tl.dot(q, tl.trans(k.to(DOT)), input_precision="ieee")
        scores, unit = soft_capped(scores, scale_log2, soft_cap, CAPPED)
        if MASKED:
            visible = (token[None, :] <= last[:, None]) & exists[None, :]
            if WINDOW > 0:
                visible = visible & (token[None, :] > position[:, None] - WINDOW)
            scores = tl.where(visible, scores, float("-inf"))
        weights, factor, largest, total = online_softmax(scores, unit, largest, total, MASKED)
        v, v_scale = _load_vectors(
            kv, kv_scales, block, place, 1, kv_head, column, exists, POOL_HEADS, D, BLOCK_D, BLOCK_SIZE, MASKED, SCALED, WIDTH
        )  # fmt: skip
        if SCALED:
            weights *= (v_scale * WEIGHTS_FACTOR)[None, :]
            even, odd = halves(v, STORED, DOT)
            acc = tl.dot(weights.to(DOT), even, acc * factor[:, None], input_precision="ieee")
            acc_odd = tl.dot(weights.to(DOT), odd, acc_odd * factor[:, None], input_precision="ieee")
        else:
            acc = tl.dot(weights.to(DOT), v.to(DOT), acc * factor[:, None], input_precision="ieee")
    return acc, acc_odd, largest, total


@launchable(overlaps=True, do_not_specialize=["table_stride"])
def _attention_kernel(
    q, kv, kv_scales, sinks, out, partial, partial_stats, items, table, scale_log2, soft_cap, table_stride, q_token_stride,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, HEADS: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, WINDOW: tl.constexpr, CAPPED: tl.constexpr,
    STORED: tl.constexpr, SINKS: tl.constexpr, ABSOLUTE: tl.constexpr, DOT: tl.constexpr,
    POOL_HEADS: tl.constexpr, FIRST: tl.constexpr, STEP: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Programs: see tiles.item_of. Unnormalised results of parts go to `partial`, to be reduced. STORED: the type of 8 bits of
    the numbers in `kv`, whose elements are pairs of them; a vector is D pairs, and its even and odd columns are apart here. None:
    a vector is D numbers. FIRST, STEP, WIDTH: see kernels/kv_parts.py. ABSOLUTE: one piece of code attends to all tokens, so that
    bits do not depend on who sees what."""
    await_inputs()
    ONE_SPAN: tl.constexpr = WINDOW > 0 or ABSOLUTE
    head_block, seq, begin, edge, end, first_row, count, first, both_ways = item_of(items, BLOCK_N, ONE_SPAN)
    if seq < 0:
        return
    token, head, exists = rows_of(count, head_block, GROUP, HEADS, tl.arange(0, BLOCK_M), BLOCK_M)
    position = first + token
    last = tl.where(both_ways != 0, end - 1, position)

    PAIRED: tl.constexpr = STORED is not None
    EACH: tl.constexpr = 2 if PAIRED else 1
    column = tl.arange(0, BLOCK_D)
    row = (first_row + token).to(tl.int64)
    mask = exists[:, None] & (column < D)[None, :]
    source = q + row[:, None] * q_token_stride + head[:, None] * (D * EACH) + column[None, :] * EACH
    queries = tl.load(source, mask, 0.0)
    acc = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    acc_odd = acc
    largest = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    if PAIRED:
        odd_queries = tl.load(source + 1, mask, 0.0)
        queries, odd_queries, size = in_range(queries, odd_queries, DOT)
    else:
        queries = queries.to(DOT)
        odd_queries, size = queries, total
    kv_head = FIRST + head_block // ((GROUP + HEADS - 1) // HEADS) * STEP
    blocks = table + seq.to(tl.int64) * table_stride
    if not ONE_SPAN:
        # All rows see what is not behind the first one's position. Compiled apart, the same arithmetic may round otherwise.
        acc, acc_odd, largest, total = _attend_span(
            acc, acc_odd, largest, total, queries, odd_queries, size, kv, kv_scales, blocks, begin, edge, position, last,
            kv_head, scale_log2, soft_cap, POOL_HEADS, D, BLOCK_D, BLOCK_N, BLOCK_SIZE, WINDOW, CAPPED, STORED, False, DOT, WIDTH,
        )  # fmt: skip
    acc, acc_odd, largest, total = _attend_span(
        acc, acc_odd, largest, total, queries, odd_queries, size, kv, kv_scales, blocks, edge, end, position, last, kv_head,
        scale_log2, soft_cap, POOL_HEADS, D, BLOCK_D, BLOCK_N, BLOCK_SIZE, WINDOW, CAPPED, STORED, True, DOT, WIDTH,
    )  # fmt: skip
    unit: tl.constexpr = 1.0 / WEIGHTS_FACTOR if PAIRED else 1.0
    first_row, count, result = result_of(items)
    token, head, exists = rows_of(count, head_block, GROUP, HEADS, tl.arange(0, BLOCK_M), BLOCK_M)
    row = (first_row + token).to(tl.int64)
    mask = exists[:, None] & (column < D)[None, :]
    if result < 0:
        factor, sum_of_all = with_sink(largest, total, sinks, head, exists, SINKS)
        each = (factor * unit / sum_of_all)[:, None]
        target = (
            out + (row[:, None] * (KV_HEADS * GROUP) + head[:, None]) * (D * EACH) + column[None, :] * EACH
        )
        tl.store(target, (acc * each).to(out.dtype.element_ty), mask)
        if PAIRED:
            tl.store(target + 1, (acc_odd * each).to(out.dtype.element_ty), mask)
    else:
        at = result * BLOCK_M + tl.arange(0, BLOCK_M)
        part = partial + at[:, None] * (D * EACH) + column[None, :] * EACH
        tl.store(part, acc * unit, mask)
        if PAIRED:
            tl.store(part + 1, acc_odd * unit, mask)
        tl.store(partial_stats + at * 2, largest, exists)
        tl.store(partial_stats + at * 2 + 1, total, exists)


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
            _attend(part, shape, q, data, scales, out, scale, window, soft_cap, sinks, places_in(kv_layer))
        return out


def _attend(
    part: LaunchPart, shape: AttentionShape, q: Tensor, kv_layer: Tensor, kv_scales: Tensor | None, out: Tensor,
    scale: float, window: int, soft_cap: float, sinks: Tensor | None, places: HeadPlaces,
) -> None:  # fmt: skip
    config, items = part.config, part.items
    stored, dot = None, q.dtype
    if kv_scales is not None:
        stored, kv_layer = STORED_DTYPES[kv_layer.dtype], kv_layer.view(torch.int16)
        dot = torch.float32 if q.dtype == torch.float32 else torch.float16
    size, head_blocks = kv_layer.shape[-1] * places.width, config.num_head_blocks(shape)
    partials = Partials.empty(items.num_places, head_blocks, config.block_m, shape.head_dim, q.device)
    _attention_kernel[head_blocks, len(items.items)](
        q, kv_layer, kv_scales, sinks, out, partials.values, partials.stats, items.items, items.table,
        scale * _LOG2E, soft_cap, items.table.stride(0), q.stride(0),
        KV_HEADS=shape.num_kv_heads, GROUP=shape.group, HEADS=config.heads, D=size,
        BLOCK_D=max(16, next_power_of_2(size)), BLOCK_SIZE=shape.block_size,
        BLOCK_M=config.block_m, BLOCK_N=config.block_n, WINDOW=window, CAPPED=soft_cap > 0,
        STORED=stored, SINKS=sinks is not None, ABSOLUTE=shape.split_tokens > 0, DOT=dot_dtype(dot),
        POOL_HEADS=kv_layer.shape[2], FIRST=places.first, STEP=places.step, WIDTH=places.width,
        num_warps=config.num_warps, num_stages=config.num_stages,
    )  # fmt: skip
    reduce_splits(
        partials, items, sinks, out, shape.num_kv_heads, config.heads, invariant=shape.split_tokens > 0
    )
