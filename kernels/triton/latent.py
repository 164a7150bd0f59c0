"""Multi-head latent attention over a paged cache of latents (arXiv:2405.04434, section 2.1), with queries brought into the latent
space: all heads of a token share one key, whose first part is the value as well and is read once for both.

Memory-bound in decode up to some hundred heads. Floor: the latents of every context are read once."""

from dataclasses import replace

import torch
import triton.language as tl
from torch import Tensor

from kernels.ops import AttentionMeta, Latents
from kernels.triton.attention_config import AttentionShape, LaunchPart, plan
from kernels.triton.attention_reduce import Partials, reduce_splits
from kernels.triton.gemm import batched_linear
from kernels.triton.hopper_latent import hopper_latent_kernel, is_for_hopper
from kernels.triton.latent_tiles import StoredLatents, latent_tile
from kernels.triton.launching import launchable
from kernels.triton.platform import dot_dtype, next_power_of_2
from kernels.triton.softmax import online_softmax, with_sink
from kernels.triton.tiles import item_of, result_of, rows_of

_LOG2E = 1.4426950408889634


@launchable(do_not_specialize=["table_stride"])
def _latent_kernel(
    q, kv, rotated_kv, kv_scales, out, partial, partial_stats, items, table, scale_log2, table_stride,
    GROUP: tl.constexpr, HEADS: tl.constexpr, RANK: tl.constexpr, ROTATED: tl.constexpr, STRIDE: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    DOT: tl.constexpr, STORED: tl.constexpr, EACH: tl.constexpr, SCALES: tl.constexpr,
):  # fmt: skip
    """See attention._attention_kernel, and latent_tiles for the last three: STORED is None where latents are floats."""
    head_block, seq, begin, _, end, first_row, count, first, _ = item_of(items, BLOCK_N, True)
    if seq < 0:
        return
    token, head, exists = rows_of(count, head_block, GROUP, HEADS, tl.arange(0, BLOCK_M), BLOCK_M)
    position = first + token

    size: tl.constexpr = RANK + ROTATED
    column, rotated = tl.arange(0, BLOCK_R), tl.arange(0, BLOCK_P)
    row = (first_row + token).to(tl.int64) * GROUP + head
    mask = exists[:, None] & (column < RANK)[None, :]
    rotated_mask = exists[:, None] & (rotated < ROTATED)[None, :]
    q_latent = tl.load(q + row[:, None] * size + column[None, :], mask, 0.0).to(DOT)
    q_rotated = tl.load(q + row[:, None] * size + RANK + rotated[None, :], rotated_mask, 0.0).to(DOT)
    acc = tl.zeros((BLOCK_M, BLOCK_R), tl.float32)
    largest = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    blocks = table + seq.to(tl.int64) * table_stride
    last = tl.minimum(position, end - 1)
    for start in tl.range(begin, end, BLOCK_N):
        at = start + tl.arange(0, BLOCK_N)
        there = at < end
        block = tl.load(blocks + at // BLOCK_SIZE, there, 0).to(tl.int64)
        place = block * BLOCK_SIZE + at % BLOCK_SIZE
        latent, key = latent_tile(
            kv, rotated_kv, kv_scales, place, there, column, rotated, RANK, ROTATED, STRIDE, STORED, EACH, SCALES
        )  # fmt: skip
        latent, key = latent.to(DOT), key.to(DOT)
        scores = tl.dot(q_latent, tl.trans(latent), input_precision="ieee")
        scores = tl.dot(q_rotated, tl.trans(key), scores, input_precision="ieee")
        scores = tl.where(at[None, :] <= last[:, None], scores, float("-inf"))
        weights, factor, largest, total = online_softmax(scores, scale_log2, largest, total)
        acc = tl.dot(weights.to(DOT), latent, acc * factor[:, None], input_precision="ieee")
    first_row, count, result = result_of(items)
    token, head, exists = rows_of(count, head_block, GROUP, HEADS, tl.arange(0, BLOCK_M), BLOCK_M)
    row = (first_row + token).to(tl.int64) * GROUP + head
    mask = exists[:, None] & (column < RANK)[None, :]
    if result < 0:
        factor, sum_of_all = with_sink(largest, total, out, head, exists, False)
        whole = acc * (factor / sum_of_all)[:, None]
        tl.store(out + row[:, None] * RANK + column[None, :], whole.to(out.dtype.element_ty), mask)
    else:
        part = result * BLOCK_M + tl.arange(0, BLOCK_M)
        tl.store(partial + part[:, None] * RANK + column[None, :], acc, mask)
        tl.store(partial_stats + part * 2, largest, exists)
        tl.store(partial_stats + part * 2 + 1, total, exists)


def absorbed_attention(
    q: Tensor,
    kv_layer: Latents,
    meta: AttentionMeta,
    scale: float,
    rank: int,
    split_tokens: int = 0,
    *,
    table: Tensor | None = None,
) -> Tensor:
    """(T, H, R + P) queries in the latent space, latents (num_blocks, 1, 1, block_size, R + P) -> (T, H, R) of latents. Behind
    each latent there may be something else in memory.

    `split_tokens` > 0: the same bits for a token in any batch (attention.TritonAttention). `table`: (sequences, blocks) int32, in
    place of those of `meta`."""
    q = q.contiguous()
    num_tokens, num_heads, size = q.shape
    out = torch.empty((num_tokens, num_heads, rank), dtype=q.dtype, device=q.device)
    shape = AttentionShape(
        num_heads=num_heads,
        num_kv_heads=1,
        head_dim=size,
        block_size=kv_layer.shape[3],
        dtype=q.dtype,
        quantised=not isinstance(kv_layer, Tensor),
        split_tokens=split_tokens,
        latents=True,
    )
    for part in plan(meta, shape, 0, q.device):
        items = part.items if table is None else replace(part.items, table=table)
        _attend(LaunchPart(part.config, items), shape, q, kv_layer, out, scale)
    return out


def _attend(
    part: LaunchPart, shape: AttentionShape, q: Tensor, kv_layer: Latents, out: Tensor, scale: float
) -> None:
    config, items, rank, latents = part.config, part.items, out.shape[2], StoredLatents.of(kv_layer)
    head_blocks = config.num_head_blocks(shape)
    partials = Partials.empty(items.num_places, head_blocks, config.block_m, rank, q.device)
    others = (
        out, partials.values, partials.stats, items.items, items.table, scale * _LOG2E, items.table.stride(0)
    )  # fmt: skip
    sizes = {
        "GROUP": shape.num_heads, "HEADS": config.heads, "RANK": rank, "ROTATED": shape.head_dim - rank,
        "STRIDE": latents.stride, "BLOCK_SIZE": shape.block_size, "BLOCK_M": config.block_m, "BLOCK_N": config.block_n,
        "num_warps": config.num_warps,
    }  # fmt: skip
    grid = (head_blocks, len(items.items))
    if is_for_hopper(shape, rank, config, q.device):
        hopper_latent_kernel[grid](q, latents.numbers, *others, **sizes)
    else:
        _latent_kernel[grid](
            q, latents.numbers, latents.rotated, latents.scales, *others, **sizes, BLOCK_R=max(16, next_power_of_2(rank)),
            BLOCK_P=max(16, next_power_of_2(shape.head_dim - rank)), DOT=dot_dtype(q.dtype), num_stages=config.num_stages,
            STORED=latents.stored, EACH=latents.each, SCALES=latents.num_scales,
        )  # fmt: skip
    reduce_splits(partials, items, None, out, 1, config.heads, invariant=shape.split_tokens > 0)


def latent_attention(
    q: Tensor, kv_layer: Latents, meta: AttentionMeta, scale: float, k_up: Tensor, v_up: Tensor
) -> Tensor:
    """`Ops.latent_attention`, absorbed for all: prompts cost about three times the flops that expanding their keys would."""
    nope, rank = k_up.shape[1:]
    in_latents = torch.einsum("thn,hnr->thr", q[..., :nope], k_up)
    queries = torch.cat((in_latents, q[..., nope:]), -1)
    return torch.einsum("thr,hvr->thv", absorbed_attention(queries, kv_layer, meta, scale, rank), v_up)


def invariant_latent_attention(
    q: Tensor, kv_layer: Latents, meta: AttentionMeta, scale: float, k_up: Tensor, v_up: Tensor, split_tokens: int
) -> Tensor:  # fmt: skip
    """The same with the same bits for a token in any batch."""
    nope, rank = k_up.shape[1:]
    queries = torch.cat((batched_linear(q[..., :nope], k_up.mT), q[..., nope:]), -1)
    return batched_linear(absorbed_attention(queries, kv_layer, meta, scale, rank, split_tokens), v_up)
