"""Latent attention for Hopper, in Gluon: see latent.py, whose kernel this is where there are 64 heads or more.

A program has 64 rows. Two groups of four warps share them: each computes the scores of half of a tile's tokens, and half of the
result's columns, so that neither does what the other does; Triton would compute all scores twice. A tile's latents lie in shared
memory once, as keys and as values, while the next tile's are copied."""

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
from kernels.triton.tiles import item_of, result_of, rows_of


@gluon.jit
def _blocks_of(table, start, end, BLOCK_N: gl.constexpr, BLOCK_SIZE: gl.constexpr, COPY: gl.constexpr):
    """(BLOCK_N,) blocks of the tokens from `start` on, read a tile before they are needed."""
    token = start + gl.arange(0, BLOCK_N, layout=gl.SliceLayout(1, COPY))
    return gl.load(table + token // BLOCK_SIZE, token < end, 0)


@gluon.jit
def _copy(
    latents, rotated, kv, block, start, end,
    RANK: gl.constexpr, ROTATED: gl.constexpr, STRIDE: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_SIZE: gl.constexpr,
    COPY: gl.constexpr,
):  # fmt: skip
    """Begin to copy the latents of BLOCK_N tokens from `start` on to shared memory, zeros from `end` on."""
    token = start + gl.arange(0, BLOCK_N, layout=gl.SliceLayout(1, COPY))
    vector = kv + (block.to(gl.int64) * BLOCK_SIZE + token % BLOCK_SIZE) * STRIDE
    there = (token < end)[:, None]
    column = gl.arange(0, RANK, layout=gl.SliceLayout(0, COPY))
    async_copy.async_copy_global_to_shared(latents, vector[:, None] + column[None, :], there)
    further = RANK + gl.arange(0, ROTATED, layout=gl.SliceLayout(0, COPY))
    async_copy.async_copy_global_to_shared(rotated, vector[:, None] + further[None, :], there)
    async_copy.commit_group()


def _latent_kernel(
    q, kv, out, partial, partial_stats, items, table, scale_log2, table_stride,
    GROUP: gl.constexpr, HEADS: gl.constexpr, RANK: gl.constexpr, ROTATED: gl.constexpr, STRIDE: gl.constexpr,
    BLOCK_SIZE: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr,
):  # fmt: skip
    """See attention._attention_kernel."""
    head_block, seq, begin, _, end, first_row, count, first, _ = item_of(items, BLOCK_N, True)
    if seq < 0:
        return
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 2], [16, BLOCK_N // 2, 16])
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 2], [16, RANK // 2, 16])
    COPY: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [8, 1], [1, 0])
    SHARED: gl.constexpr = gl.NVMMASharedLayout(128, 16)
    SCORE_ROW: gl.constexpr = gl.SliceLayout(1, SCORES)
    SUM_ROW: gl.constexpr = gl.SliceLayout(1, SUMS)
    DTYPE: gl.constexpr = q.dtype.element_ty

    q_latent = gl.allocate_shared_memory(DTYPE, [BLOCK_M, RANK], SHARED)
    q_rotated = gl.allocate_shared_memory(DTYPE, [BLOCK_M, ROTATED], SHARED)
    latents = gl.allocate_shared_memory(DTYPE, [2, BLOCK_N, RANK], SHARED)
    rotated = gl.allocate_shared_memory(DTYPE, [2, BLOCK_N, ROTATED], SHARED)
    weights_shared = gl.allocate_shared_memory(DTYPE, [BLOCK_M, BLOCK_N], SHARED)

    row = gl.arange(0, BLOCK_M, layout=gl.SliceLayout(1, COPY))
    token, head, exists = rows_of(count, head_block, GROUP, HEADS, row, BLOCK_M)
    source = q + ((first_row + token).to(gl.int64) * GROUP + head) * (RANK + ROTATED)
    column = gl.arange(0, RANK, layout=gl.SliceLayout(0, COPY))
    further = RANK + gl.arange(0, ROTATED, layout=gl.SliceLayout(0, COPY))
    async_copy.async_copy_global_to_shared(q_latent, source[:, None] + column[None, :], exists[:, None])
    async_copy.async_copy_global_to_shared(q_rotated, source[:, None] + further[None, :], exists[:, None])
    blocks = table + seq.to(gl.int64) * table_stride
    block = _blocks_of(blocks, begin, end, BLOCK_N, BLOCK_SIZE, COPY)
    _copy(
        latents.index(0), rotated.index(0), kv, block, begin, end, RANK, ROTATED, STRIDE, BLOCK_N, BLOCK_SIZE, COPY
    )  # fmt: skip
    block = _blocks_of(blocks, begin + BLOCK_N, end, BLOCK_N, BLOCK_SIZE, COPY)

    row = gl.arange(0, BLOCK_M, layout=SCORE_ROW)
    token, head, exists = rows_of(count, head_block, GROUP, HEADS, row, BLOCK_M)
    last = gl.minimum(first + token, end - 1)
    largest = gl.full([BLOCK_M], float("-inf"), gl.float32, SCORE_ROW)
    totals = gl.full([BLOCK_M, BLOCK_N], 0.0, gl.float32, SCORES)
    nothing = gl.full([BLOCK_M, BLOCK_N], 0.0, gl.float32, SCORES)
    acc = gl.full([BLOCK_M, RANK], 0.0, gl.float32, SUMS)
    seen_by_all = min(first + 1, end)
    for start in range(begin, end, BLOCK_N):
        tile = (start - begin) // BLOCK_N
        async_copy.wait_group(0)
        fence_async_shared()
        tl.debug_barrier()
        values, keys = latents.index(tile % 2), rotated.index(tile % 2)
        scores = warpgroup_mma(q_latent, values.permute((1, 0)), nothing, use_acc=False, is_async=True)
        scores = warpgroup_mma(q_rotated, keys.permute((1, 0)), scores, is_async=True)
        _copy(
            latents.index((tile + 1) % 2), rotated.index((tile + 1) % 2), kv, block, start + BLOCK_N, end,
            RANK, ROTATED, STRIDE, BLOCK_N, BLOCK_SIZE, COPY,
        )  # fmt: skip
        block = _blocks_of(blocks, start + 2 * BLOCK_N, end, BLOCK_N, BLOCK_SIZE, COPY)
        scores = warpgroup_mma_wait(0, [scores])
        if start + BLOCK_N > seen_by_all:
            at_token = start + gl.arange(0, BLOCK_N, layout=gl.SliceLayout(0, SCORES))
            scores = gl.where(at_token[None, :] <= last[:, None], scores, float("-inf"))
        now = gl.maximum(largest, gl.max(scores, 1) * scale_log2)
        base = gl.where(now == float("-inf"), 0.0, now)
        weights = gl.exp2(scores * scale_log2 - base[:, None])
        factor = gl.exp2(largest - base)
        largest = now
        totals = totals * factor[:, None] + weights
        weights_shared.store(weights.to(DTYPE))
        fence_async_shared()
        tl.debug_barrier()
        # No product is under way where an iteration ends: ptxas would wait for each instruction of all of them.
        acc = acc * gl.convert_layout(factor, SUM_ROW)[:, None]
        sums = warpgroup_mma(weights_shared, values, acc, is_async=True)
        acc = warpgroup_mma_wait(0, [sums])
    async_copy.wait_group(0)
    total = gl.sum(totals, 1)

    first_row, count, result = result_of(items)
    sum_row = gl.arange(0, BLOCK_M, layout=SUM_ROW)
    sum_token, sum_head, sum_exists = rows_of(count, head_block, GROUP, HEADS, sum_row, BLOCK_M)
    column = gl.arange(0, RANK, layout=gl.SliceLayout(0, SUMS))
    if result < 0:
        factor, sum_of_all = with_sink(largest, total, out, head, exists, False)
        whole = acc * gl.convert_layout(factor / sum_of_all, SUM_ROW)[:, None]
        target = out + ((first_row + sum_token).to(gl.int64) * GROUP + sum_head)[:, None] * RANK
        gl.store(target + column[None, :], whole.to(out.dtype.element_ty), sum_exists[:, None])
    else:
        at = result * BLOCK_M
        gl.store(partial + (at + sum_row)[:, None] * RANK + column[None, :], acc, sum_exists[:, None])
        gl.store(partial_stats + (at + row) * 2, largest, exists)
        gl.store(partial_stats + (at + row) * 2 + 1, total, exists)


hopper_latent_kernel = Kernel(gluon.jit(_latent_kernel, do_not_specialize=["table_stride"]))


def is_for_hopper(shape: AttentionShape, rank: int, config: AttentionConfig, device: torch.device) -> bool:
    """Return whether `hopper_latent_kernel` does this: what it keeps in shared memory fits for these sizes alone."""
    sizes = (rank, shape.head_dim - rank, config.block_m, config.block_n, config.num_warps)
    is_half = shape.dtype.itemsize == 2 and not shape.quantised
    return not INTERPRETED and capability(device) == 90 and is_half and sizes == (512, 64, 64, 64, 8)
