"""Pure PyTorch of every operation: the specification, and what runs on a CPU."""

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

from kernels.kv_parts import KVPart
from kernels.ops import (
    AttentionMeta,
    DenseLayer,
    ExpertWeights,
    FeedForward,
    FusedLayers,
    Gate,
    GatedBlock,
    HeadNorms,
    KVLayer,
    Ops,
)
from kernels.packed import EightBit, LinearWeight, LookUp, Prepacked, Weight, as_float
from kernels.rounding import Activations, Rounded, Rounding, as_floats, round_to
from kernels.table_rows import ScaledRows, TableRows
from kernels.torch.experts import experts, route
from kernels.torch.gated_delta import gated_delta
from kernels.torch.latent_attention import latent_attention
from kernels.torch.paged_attention import PagedAttention
from kernels.torch.sampling import logprobs, penalise, sample
from kernels.torch.scaled_kv import store_vectors
from kernels.torch.short_convolution import short_convolution
from kernels.torch.state_space import state_space
from kernels.torch.stored_latents import write_latent
from kernels.torch.token_index import select_tokens, selected_attention

_HALVES = (torch.bfloat16, torch.float16)
RmsNorm = Callable[[Tensor, Tensor, float], Tensor]


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    if x.dtype == torch.float32:
        return F.rms_norm(x, (x.shape[-1],), weight, eps)
    return F.rms_norm(x.float(), (x.shape[-1],), weight, eps).to(x.dtype)


def add_rms_norm(
    rms_norm: RmsNorm, x: Tensor, residual: Tensor, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """`Ops.add_rms_norm` over `rms_norm`."""
    total = residual + x
    return total, rms_norm(total, weight, eps)


def rope_write_kv(
    rms_norm: RmsNorm,
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    norms: HeadNorms | None,
    kv_layer: KVLayer,
    meta: AttentionMeta,
) -> Tensor:
    """`Ops.rope_write_kv` over `rms_norm`."""
    kv_heads, size = kv_layer.shape[2], kv_layer.shape[4]
    heads = qkv.view(len(qkv), -1, size)
    num_heads = heads.shape[1] - 2 * kv_heads
    turned, v = heads[:, : num_heads + kv_heads], heads[:, num_heads + kv_heads :]
    if norms is not None:
        q_weight, k_weight, eps = norms
        q, k = turned[:, :num_heads], turned[:, num_heads:]
        turned = torch.cat((rms_norm(q, q_weight, eps), rms_norm(k, k_weight, eps)), 1)
    turned = rope(turned, cos, sin)
    write_kv(turned[:, num_heads:], v, kv_layer, meta)
    return turned[:, :num_heads]


def rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    rotated = torch.cat((-x[..., half:], x[..., :half]), -1)
    return x * cos[:, None] + rotated * sin[:, None]


def silu_mul(x: Tensor) -> Tensor:
    gate, up = x.chunk(2, -1)
    return F.silu(gate) * up


def gelu_tanh_mul(x: Tensor) -> Tensor:
    gate, up = x.chunk(2, -1)
    return F.gelu(gate, approximate="tanh") * up


def clamped_swiglu(x: Tensor, alpha: float, limit: float) -> Tensor:
    gate, up = x.chunk(2, -1)
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return gate * torch.sigmoid(gate * alpha) * (up + 1)


def write_kv(k: Tensor, v: Tensor, kv_layer: KVLayer, meta: AttentionMeta) -> None:
    """`k` and v (T, Hkv, D), stored at meta.slots."""
    part = kv_layer if isinstance(kv_layer, KVPart) else None
    stored = kv_layer if not isinstance(kv_layer, KVPart) else kv_layer.data
    num_heads, block_size, size = stored.shape[2:]
    key = "write_rows", num_heads, None if part is None else part.places
    if (rows := meta.cache.get(key)) is None:
        block, offset = meta.slots // block_size, meta.slots % block_size
        first = (block * 2 * num_heads * block_size + offset)[:, None]
        heads = torch.arange(num_heads) if part is None else part.heads
        key_rows = first + heads.to(first.device) * block_size
        rows = meta.cache[key] = (key_rows.flatten(), (key_rows + num_heads * block_size).flatten())
    store_vectors(k.reshape(-1, size), stored, rows[0])
    store_vectors(v.reshape(-1, size), stored, rows[1])


def linear(x: Activations, weight: LinearWeight, bias: Tensor | None) -> Tensor:
    assert not isinstance(weight, Prepacked), "nothing is packed here"
    return F.linear(as_floats(x), as_float(weight, x.dtype), bias)


def as_stored(weight: Weight, dtype: torch.dtype) -> LinearWeight:
    """`Ops.pack` where products read weights as they are."""
    del dtype
    return weight


def look_up(weight: Weight, dtype: torch.dtype, head: LinearWeight | None) -> LookUp:
    """`Ops.look_up`: in the 16 bits that the embedding is stored in, where it is, since float32 has each such number; and copied,
    so that it holds no file. One of 8 bits stays as it is where each row has a scale."""
    del head
    if isinstance(weight, EightBit) and not weight.by_blocks:
        return ScaledRows(weight, dtype)
    if isinstance(weight, Tensor) and weight.dtype in _HALVES and dtype == torch.float32:
        return TableRows(weight.clone())
    return TableRows(as_float(weight, dtype))


def experts_as_stored(held: ExpertWeights) -> ExpertWeights:
    """`Ops.pack_experts` likewise."""
    return held


def no_rounding(weight: Weight) -> Rounding | None:
    """`Ops.rounds` where weights of 8 bits are multiplied as the floats that they mean."""
    del weight


def norm_rounded(
    x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, how: Rounding
) -> tuple[Tensor, Rounded]:
    total = x if residual is None else residual + x
    return total, round_to(rms_norm(total, weight, eps), how)


def gated_rounded(x: Tensor, gate: Gate, how: Rounding) -> Rounded:
    return round_to(silu_mul(x) if gate == "silu" else gelu_tanh_mul(x), how)


def by_rows(operation: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    return operation(x)


def feed_forward(block: GatedBlock, in_order: FeedForward) -> FeedForward:
    """`Ops.feed_forward` where its operations are computed one after the other."""
    del block
    return in_order


def no_fusing(layers: Sequence[DenseLayer]) -> FusedLayers | None:
    """`Ops.fuse` where layers are computed one operation after the other."""
    del layers


def reference_ops() -> Ops:
    """Return the operations for one model on one thread: attention keeps scratch memory between calls."""
    return Ops(
        rms_norm=rms_norm,
        add_rms_norm=partial(add_rms_norm, rms_norm),
        rope=rope,
        silu_mul=silu_mul,
        gelu_tanh_mul=gelu_tanh_mul,
        clamped_swiglu=clamped_swiglu,
        pack=as_stored,
        look_up=look_up,
        pack_experts=experts_as_stored,
        linear=linear,
        rounds=no_rounding,
        norm_rounded=norm_rounded,
        gated_rounded=gated_rounded,
        by_rows=by_rows,
        feed_forward=feed_forward,
        rope_write_kv=partial(rope_write_kv, rms_norm),
        paged_attention=PagedAttention(),
        route=route,
        penalise=penalise,
        sample=sample,
        logprobs=logprobs,
        experts=experts,
        write_latent=write_latent,
        latent_attention=latent_attention,
        select_tokens=select_tokens,
        selected_attention=selected_attention,
        gated_delta=gated_delta,
        short_convolution=short_convolution,
        state_space=state_space,
        fixed_step=None,
        fuse=no_fusing,
        keeps=frozenset(),
    )
