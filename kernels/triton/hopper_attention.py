"""Attention of prompts for Hopper, in Gluon: see attention.py, whose kernel this is where it was found to be faster.

After FlashAttention-3 (Shah et al., 2024): while a tile's values are multiplied with its weights, the scores of the next one
become weights. Triton waits for a product wherever its result is read in the same iteration, so that products and exponents take
turns there. No product is under way where an iteration ends: ptxas would wait for each instruction of all of them."""

import torch
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from kernels.triton.attention_config import AttentionConfig, AttentionShape
from kernels.triton.launching import Kernel
from kernels.triton.platform import INTERPRETED, capability
from kernels.triton.softmax import with_sink
from kernels.triton.tiles import item_of, rows_of


@gluon.jit
def blocks_of(table, start, end, BLOCK_N: gl.constexpr, BLOCK_SIZE: gl.constexpr, COPY: gl.constexpr):
    """(BLOCK_N,) blocks of the tokens from `start` on, read a tile before they are needed."""
    token = start + gl.arange(0, BLOCK_N, layout=gl.SliceLayout(1, COPY))
    return gl.load(table + token // BLOCK_SIZE, token < end, 0)


@gluon.jit
def _copy(
    target, kv, block, start, end, plane, KV_HEADS: gl.constexpr, D: gl.constexpr, BLOCK_N: gl.constexpr,
    BLOCK_SIZE: gl.constexpr, COPY: gl.constexpr,
):  # fmt: skip
    """Begin to copy BLOCK_N vectors from token `start` on, zeros from `end` on. plane: KV head, or KV_HEADS + it for values."""
    index = gl.arange(0, BLOCK_N, layout=gl.SliceLayout(1, COPY))
    column = gl.arange(0, D, layout=gl.SliceLayout(0, COPY))
    vector = (
        block.to(gl.int64) * (2 * KV_HEADS * BLOCK_SIZE * D)
        + (plane * BLOCK_SIZE + (start + index) % BLOCK_SIZE) * D
    )
    async_copy.async_copy_global_to_shared(
        target, kv + vector[:, None] + column[None, :], (start + index < end)[:, None]
    )


@gluon.jit
def _weights_of(
    scores, start, end, last, scale_log2, largest, total, BLOCK_N: gl.constexpr, SCORES: gl.constexpr, MASKED: gl.constexpr,
):  # fmt: skip
    """As softmax.online_softmax; MASKED: not all rows see all of the tile."""
    if MASKED:
        token = start + gl.arange(0, BLOCK_N, layout=gl.SliceLayout(0, SCORES))
        seen = (token[None, :] <= last[:, None]) & (token < end)[None, :]
        scores = gl.where(seen, scores, float("-inf"))
    now = gl.maximum(largest, gl.max(scores, 1) * scale_log2)
    base = now
    if MASKED:
        base = gl.where(now == float("-inf"), 0.0, now)
    weights = gl.exp2(scores * scale_log2 - base[:, None])
    factor = gl.exp2(largest - base)
    return weights, factor, now, total * factor + gl.sum(weights, 1)


@gluon.jit
def _step(
    tile, weights, acc, largest, total, block, next_block, q_shared, keys, values, kv, table, begin, end, last, scale_log2,
    kv_head, KV_HEADS: gl.constexpr, D: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_SIZE: gl.constexpr, COPY: gl.constexpr,
    SCORES: gl.constexpr, MASKED: gl.constexpr,
):  # fmt: skip
    """Add the tile with these `weights`, and make those of the next one. `block`, `next_block`: of the next tile, and of the one
    behind it."""
    WEIGHTS: gl.constexpr = gl.DotOperandLayout(0, acc.type.layout, 2)
    here, there = tile % 2, (tile + 1) % 2
    nothing = gl.full([last.shape[0], BLOCK_N], 0.0, gl.float32, SCORES)
    async_copy.wait_group(0)
    fence_async_shared()
    tl.debug_barrier()
    scores = warpgroup_mma(q_shared, keys.index(there).permute((1, 0)), nothing, use_acc=False, is_async=True)
    sums = warpgroup_mma(weights, values.index(here), acc, is_async=True)
    start = begin + (tile + 1) * BLOCK_N
    _copy(
        keys.index(here),
        kv,
        next_block,
        start + BLOCK_N,
        end,
        kv_head,
        KV_HEADS,
        D,
        BLOCK_N,
        BLOCK_SIZE,
        COPY,
    )
    _copy(
        values.index(there), kv, block, start, end, KV_HEADS + kv_head, KV_HEADS, D, BLOCK_N, BLOCK_SIZE, COPY
    )
    async_copy.commit_group()
    further_block = blocks_of(table, start + 2 * BLOCK_N, end, BLOCK_N, BLOCK_SIZE, COPY)
    scores = warpgroup_mma_wait(1, [scores])
    following, factor, largest, total = _weights_of(
        scores, start, end, last, scale_log2, largest, total, BLOCK_N, SCORES, MASKED
    )
    following = gl.convert_layout(following.to(q_shared.dtype), WEIGHTS)
    acc = warpgroup_mma_wait(0, [sums])
    acc = acc * gl.convert_layout(factor, gl.SliceLayout(1, acc.type.layout))[:, None]
    return following, acc, largest, total, next_block, further_block


def _attention_kernel(
    q, kv, sinks, out, partial, partial_stats, items, table, scale_log2, table_stride, q_token_stride,
    KV_HEADS: gl.constexpr, GROUP: gl.constexpr, HEADS: gl.constexpr, D: gl.constexpr, BLOCK_SIZE: gl.constexpr,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, SINKS: gl.constexpr, NUM_WARPS: gl.constexpr,
):  # fmt: skip
    """See attention._attention_kernel."""
    head_block, seq, begin, edge, end, first_row, count, first, place, result, both_ways = item_of(
        items, BLOCK_N, False
    )
    if seq < 0:
        return
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [NUM_WARPS, 1], [16, BLOCK_N, 16])
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [NUM_WARPS, 1], [16, D, 16])
    COPY: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [NUM_WARPS, 1], [1, 0])
    SHARED: gl.constexpr = gl.NVMMASharedLayout(128, 16)
    SCORE_ROW: gl.constexpr = gl.SliceLayout(1, SCORES)
    SUM_ROW: gl.constexpr = gl.SliceLayout(1, SUMS)
    DTYPE: gl.constexpr = q.dtype.element_ty
    kv_head = head_block // ((GROUP + HEADS - 1) // HEADS)
    blocks = table + seq.to(gl.int64) * table_stride

    q_shared = gl.allocate_shared_memory(DTYPE, [BLOCK_M, D], SHARED)
    keys = gl.allocate_shared_memory(DTYPE, [2, BLOCK_N, D], SHARED)
    values = gl.allocate_shared_memory(DTYPE, [2, BLOCK_N, D], SHARED)
    row = gl.arange(0, BLOCK_M, layout=gl.SliceLayout(1, COPY))
    token, head, exists = rows_of(count, head_block, GROUP, HEADS, row, BLOCK_M)
    source = q + (first_row + token).to(gl.int64) * q_token_stride + head * D
    column = gl.arange(0, D, layout=gl.SliceLayout(0, COPY))
    async_copy.async_copy_global_to_shared(q_shared, source[:, None] + column[None, :], exists[:, None])
    block = blocks_of(blocks, begin, end, BLOCK_N, BLOCK_SIZE, COPY)
    next_block = blocks_of(blocks, begin + BLOCK_N, end, BLOCK_N, BLOCK_SIZE, COPY)
    _copy(keys.index(0), kv, block, begin, end, kv_head, KV_HEADS, D, BLOCK_N, BLOCK_SIZE, COPY)
    async_copy.commit_group()
    _copy(
        keys.index(1), kv, next_block, begin + BLOCK_N, end, kv_head, KV_HEADS, D, BLOCK_N, BLOCK_SIZE, COPY
    )
    _copy(values.index(0), kv, block, begin, end, KV_HEADS + kv_head, KV_HEADS, D, BLOCK_N, BLOCK_SIZE, COPY)
    async_copy.commit_group()
    block, next_block = next_block, blocks_of(blocks, begin + 2 * BLOCK_N, end, BLOCK_N, BLOCK_SIZE, COPY)

    row = gl.arange(0, BLOCK_M, layout=SCORE_ROW)
    token, head, exists = rows_of(count, head_block, GROUP, HEADS, row, BLOCK_M)
    last = gl.where(both_ways != 0, end - 1, first + token)
    largest = gl.full([BLOCK_M], float("-inf"), gl.float32, SCORE_ROW)
    total = gl.full([BLOCK_M], 0.0, gl.float32, SCORE_ROW)
    nothing = gl.full([BLOCK_M, BLOCK_N], 0.0, gl.float32, SCORES)
    acc = gl.full([BLOCK_M, D], 0.0, gl.float32, SUMS)
    async_copy.wait_group(1)
    fence_async_shared()
    tl.debug_barrier()
    scores = warpgroup_mma(q_shared, keys.index(0).permute((1, 0)), nothing, use_acc=False, is_async=True)
    scores = warpgroup_mma_wait(0, [scores])
    weights, factor, largest, total = _weights_of(
        scores, begin, end, last, scale_log2, largest, total, BLOCK_N, SCORES, True
    )
    weights = gl.convert_layout(weights.to(DTYPE), gl.DotOperandLayout(0, SUMS, 2))
    num_tiles = max((end - begin + BLOCK_N - 1) // BLOCK_N, 1)
    plain = max((edge - begin) // BLOCK_N - 1, 0)
    for tile in range(0, plain):
        weights, acc, largest, total, block, next_block = _step(
            tile, weights, acc, largest, total, block, next_block, q_shared, keys, values, kv, blocks, begin, end, last,
            scale_log2, kv_head, KV_HEADS, D, BLOCK_N, BLOCK_SIZE, COPY, SCORES, False,
        )  # fmt: skip
    for tile in range(plain, num_tiles - 1):
        weights, acc, largest, total, block, next_block = _step(
            tile, weights, acc, largest, total, block, next_block, q_shared, keys, values, kv, blocks, begin, end, last,
            scale_log2, kv_head, KV_HEADS, D, BLOCK_N, BLOCK_SIZE, COPY, SCORES, True,
        )  # fmt: skip
    async_copy.wait_group(0)
    fence_async_shared()
    tl.debug_barrier()
    sums = warpgroup_mma(weights, values.index((num_tiles - 1) % 2), acc, is_async=True)
    acc = warpgroup_mma_wait(0, [sums])

    sum_row = gl.arange(0, BLOCK_M, layout=SUM_ROW)
    sum_token, sum_head, sum_exists = rows_of(count, head_block, GROUP, HEADS, sum_row, BLOCK_M)
    column = gl.arange(0, D, layout=gl.SliceLayout(0, SUMS))
    if place < 0:
        factor, sum_of_all = with_sink(largest, total, sinks, head, exists, SINKS)
        whole = acc * gl.convert_layout(factor / sum_of_all, SUM_ROW)[:, None]
        target = out + ((first_row + sum_token).to(gl.int64) * (KV_HEADS * GROUP) + sum_head)[:, None] * D
        gl.store(target + column[None, :], whole.to(out.dtype.element_ty), sum_exists[:, None])
    else:
        at = result * BLOCK_M
        gl.store(partial + (at + sum_row)[:, None] * D + column[None, :], acc, sum_exists[:, None])
        gl.store(partial_stats + (at + row) * 2, largest, exists)
        gl.store(partial_stats + (at + row) * 2 + 1, total, exists)


hopper_attention_kernel = Kernel(gluon.jit(_attention_kernel, do_not_specialize=["table_stride"]))


def is_for_hopper(
    shape: AttentionShape, config: AttentionConfig, window: int, soft_cap: float, device: torch.device
) -> bool:
    """Return whether `hopper_attention_kernel` does this."""
    is_plain = window == 0 and soft_cap == 0 and not shape.quantised and shape.split_tokens == 0
    is_half, is_large = shape.dtype.itemsize == 2, shape.head_dim in {64, 128} and config.block_m == 128
    return not INTERPRETED and capability(device) == 90 and is_plain and is_half and is_large
