"""Pure PyTorch of every operation: the specification, and what runs on a CPU."""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from kernels.latent import latent_attention, write_latent
from kernels.moe import experts, route
from kernels.ops import AttentionMeta, Ops
from kernels.paged import PagedAttention


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    if x.dtype == torch.float32:
        return F.rms_norm(x, (x.shape[-1],), weight, eps)
    return F.rms_norm(x.float(), (x.shape[-1],), weight, eps).to(x.dtype)


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


def write_kv(k: Tensor, v: Tensor, kv_layer: Tensor, meta: AttentionMeta) -> None:
    num_heads, block_size, head_dim = kv_layer.shape[2:]
    if (rows := meta.cache.get("write_rows")) is None:
        block, offset = meta.slots // block_size, meta.slots % block_size
        first = (block * 2 * num_heads * block_size + offset)[:, None]
        key_rows = first + torch.arange(num_heads, device=first.device) * block_size
        rows = meta.cache["write_rows"] = (key_rows.flatten(), (key_rows + num_heads * block_size).flatten())
    flat = kv_layer.view(-1, head_dim)
    flat.index_copy_(0, rows[0], k.reshape(-1, head_dim))
    flat.index_copy_(0, rows[1], v.reshape(-1, head_dim))


def by_rows(operation: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    return operation(x)


def reference_ops() -> Ops:
    """For one model on one thread: attention keeps scratch memory between calls."""
    return Ops(
        rms_norm=rms_norm,
        rope=rope,
        silu_mul=silu_mul,
        gelu_tanh_mul=gelu_tanh_mul,
        clamped_swiglu=clamped_swiglu,
        linear=F.linear,
        by_rows=by_rows,
        write_kv=write_kv,
        paged_attention=PagedAttention(),
        route=route,
        experts=experts,
        write_latent=write_latent,
        latent_attention=latent_attention,
    )
