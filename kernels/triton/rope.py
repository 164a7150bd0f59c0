"""Rotary embeddings (Su et al., 2021); the same fused with the norm of heads before and the KV write behind.

Memory-bound. Floor: the projection (T, H + 2 Hkv, D) is read once, the queries and the KV written once."""

import triton
import triton.language as tl
from torch import Tensor

from kernels.ops import KVLayer
from kernels.rounding import LARGEST
from kernels.triton.launching import await_inputs, launchable
from kernels.triton.platform import cdiv, next_power_of_2, parts_of, places_in
from kernels.triton.quantise import scale_for, stored


@launchable()
def _rope_kernel(
    x, cos, sin, out, heads, token_stride, head_stride, angle_stride,
    HALF: tl.constexpr, BLOCK_HALF: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    column = tl.arange(0, BLOCK_HALF)
    mask = (head < heads)[:, None] & (column < HALF)[None, :]
    source = x + token * token_stride + head[:, None] * head_stride + column[None, :]
    first = tl.load(source, mask, 0.0).to(tl.float32)
    second = tl.load(source + HALF, mask, 0.0).to(tl.float32)
    c = tl.load(cos + token * angle_stride + column, column < HALF, 0.0).to(tl.float32)[None, :]
    s = tl.load(sin + token * angle_stride + column, column < HALF, 0.0).to(tl.float32)[None, :]
    target = out + (token * heads + head[:, None]) * (2 * HALF) + column[None, :]
    tl.store(target, (first * c - second * s).to(out.dtype.element_ty), mask)
    tl.store(target + HALF, (second * c + first * s).to(out.dtype.element_ty), mask)


@triton.jit
def _normed(first, second, weight, column, is_mine, eps, HALF: tl.constexpr):
    """Rows where `is_mine` divided by their root mean square and multiplied by `weight` (2 HALF,)."""
    inverse = tl.rsqrt((tl.sum(first * first, 1) + tl.sum(second * second, 1)) / (2 * HALF) + eps)[:, None]
    w_first = tl.load(weight + column, column < HALF, 0.0).to(tl.float32)[None, :]
    w_second = tl.load(weight + HALF + column, column < HALF, 0.0).to(tl.float32)[None, :]
    mine = is_mine[:, None]
    return tl.where(mine, first * inverse * w_first, first), tl.where(
        mine, second * inverse * w_second, second
    )


@launchable(overlaps=True)
def _rope_write_kernel(
    qkv, cos, sin, q_norm, k_norm, slots, q_out, kv, kv_scales, eps, token_stride, angle_stride,
    H: tl.constexpr, KV_HEADS: tl.constexpr, HALF: tl.constexpr, BLOCK_HALF: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, HEADS: tl.constexpr, NORM: tl.constexpr, LARGEST: tl.constexpr,
    POOL_HEADS: tl.constexpr, FIRST: tl.constexpr, STEP: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """HEADS neighbouring heads of one token's (H + 2 KV_HEADS) of them, in one pass over both halves of each. FIRST, STEP,
    WIDTH: see kernels/kv_parts.py."""
    await_inputs()
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    column = tl.arange(0, BLOCK_HALF)
    inside = (column < HALF)[None, :]
    is_query, is_value = head < H, head >= H + KV_HEADS
    exists = head < H + 2 * KV_HEADS
    source = qkv + token * token_stride + head[:, None] * (2 * HALF) + column[None, :]
    mask = exists[:, None] & inside
    first = tl.load(source, mask, 0.0).to(tl.float32)
    second = tl.load(source + HALF, mask, 0.0).to(tl.float32)
    if NORM:
        first, second = _normed(first, second, q_norm, column, is_query, eps, HALF)
        first, second = _normed(first, second, k_norm, column, ~is_query & ~is_value, eps, HALF)
    c = tl.load(cos + token * angle_stride + column, column < HALF, 0.0).to(tl.float32)[None, :]
    s = tl.load(sin + token * angle_stride + column, column < HALF, 0.0).to(tl.float32)[None, :]
    turned = ~is_value[:, None]
    rotated = tl.where(turned, first * c - second * s, first)
    second = tl.where(turned, second * c + first * s, second)
    first = rotated

    target = q_out + (token * H + head[:, None]) * (2 * HALF) + column[None, :]
    q_mask = is_query[:, None] & inside
    tl.store(target, first.to(q_out.dtype.element_ty), q_mask)
    tl.store(target + HALF, second.to(q_out.dtype.element_ty), q_mask)

    slot = tl.load(slots + token)
    # Planes of a block are K's heads, then V's: the heads behind the queries, in their order.
    in_planes = head - H
    if POOL_HEADS > KV_HEADS:
        in_planes = (head - H) // KV_HEADS * POOL_HEADS + FIRST + (head - H) % KV_HEADS * STEP
    vector = (slot // BLOCK_SIZE * (2 * POOL_HEADS) + in_planes) * BLOCK_SIZE + slot % BLOCK_SIZE
    kv_exists = exists & ~is_query
    if LARGEST > 0:
        largest = tl.maximum(tl.max(tl.abs(first), 1), tl.max(tl.abs(second), 1))
        scale = scale_for(largest, LARGEST)
        tl.store(kv_scales + vector, scale, kv_exists)
        first = stored(first / scale[:, None], LARGEST, kv.dtype.element_ty)
        second = stored(second / scale[:, None], LARGEST, kv.dtype.element_ty)
    PIECE: tl.constexpr = 2 * HALF // WIDTH
    in_first, in_second = column, column + HALF
    if WIDTH > 1:
        in_first = in_first // PIECE * (BLOCK_SIZE * PIECE) + in_first % PIECE
        in_second = in_second // PIECE * (BLOCK_SIZE * PIECE) + in_second % PIECE
    kv_target = kv + vector[:, None] * PIECE
    kv_mask = kv_exists[:, None] & inside
    tl.store(kv_target + in_first[None, :], first.to(kv.dtype.element_ty), kv_mask)
    tl.store(kv_target + in_second[None, :], second.to(kv.dtype.element_ty), kv_mask)


def rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """(T, heads, D) with contiguous vectors, cos and sin (T, D) -> (T, heads, D), contiguous."""
    assert x.stride(2) == 1
    num_tokens, heads, size = x.shape
    out = x.new_empty(x.shape)
    half = next_power_of_2(size // 2)
    tile = min(next_power_of_2(heads), max(1, 2048 // half))
    _rope_kernel[(num_tokens, cdiv(heads, tile))](
        x, cos, sin, out, heads, x.stride(0), x.stride(1), cos.stride(0),
        HALF=size // 2, BLOCK_HALF=half, HEADS=tile, num_warps=4,
    )  # fmt: skip
    return out


def rope_and_write_kv(
    qkv: Tensor, cos: Tensor, sin: Tensor, slots: Tensor, kv_layer: KVLayer, num_heads: int,
    norms: tuple[Tensor, Tensor, float] | None = None,
) -> Tensor:  # fmt: skip
    """(T, (H + 2 Hkv) D) -> rotated queries (T, H, D); rotated keys and the values go to `slots` (T,) of `kv_layer`.

    norms: weights (D,) of queries and keys and epsilon, applied before the rotation."""
    data, scales = parts_of(kv_layer)
    assert qkv.stride(-1) == 1
    assert data.is_contiguous()
    places = places_in(kv_layer)
    _, _, kv_heads, block_size, size = kv_layer.shape
    num_tokens, heads = qkv.shape[0], num_heads + 2 * kv_heads
    q = qkv.new_empty((num_tokens, num_heads, size))
    half = next_power_of_2(size // 2)
    tile = min(next_power_of_2(heads), max(1, 1024 // half))
    q_norm, k_norm, eps = norms or (None, None, 0.0)
    _rope_write_kernel[(num_tokens, cdiv(heads, tile))](
        qkv, cos, sin, q_norm, k_norm, slots, q, data, scales, eps, qkv.stride(0), cos.stride(0),
        H=num_heads, KV_HEADS=kv_heads, HALF=size // 2, BLOCK_HALF=half, BLOCK_SIZE=block_size, HEADS=tile,
        NORM=norms is not None, LARGEST=0.0 if scales is None else LARGEST[data.dtype],
        POOL_HEADS=data.shape[2], FIRST=places.first, STEP=places.step, WIDTH=places.width, num_warps=4,
    )  # fmt: skip
    return q
