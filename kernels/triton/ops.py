"""`Ops` of the Triton kernels. Products of many rows of floats are left to cuBLAS, what has no kernel to PyTorch."""

from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from kernels.ops import AttentionMeta, HeadNorms, KVLayer, Ops
from kernels.rounding import rounding_of
from kernels.torch import reference
from kernels.torch.reference import no_rounding, reference_ops
from kernels.triton import gemm
from kernels.triton.activation import gated_rounded, gelu_tanh_mul, silu_mul
from kernels.triton.attention import TritonAttention
from kernels.triton.fixed_step import TritonFixedStep
from kernels.triton.latent import invariant_latent_attention, latent_attention
from kernels.triton.norm import add_rms_norm, norm_rounded, rms_norm
from kernels.triton.rope import rope, rope_and_write_kv
from kernels.triton.route import route
from kernels.triton.sampling import logprobs, penalise, sample_rows
from kernels.triton.token_index import invariant_selected_attention, select_tokens, selected_attention
from kernels.triton.weights import experts, feed_forward, kept, linear

_SPLIT_TOKENS = 1024
_EXPERT_ROWS = 64


def _add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    return residual, add_rms_norm(x, residual, weight, eps)


def _rope_write_kv(
    qkv: Tensor, cos: Tensor, sin: Tensor, norms: HeadNorms | None, kv_layer: KVLayer, meta: AttentionMeta
) -> Tensor:
    num_heads = qkv.shape[1] // kv_layer.shape[4] - 2 * kv_layer.shape[2]
    return rope_and_write_kv(qkv, cos, sin, meta.slots, kv_layer, num_heads, norms=norms)


def triton_ops(device: torch.device) -> Ops:
    return replace(
        reference_ops(),
        linear=linear,
        rounds=rounding_of,
        norm_rounded=norm_rounded,
        gated_rounded=gated_rounded,
        feed_forward=feed_forward,
        rms_norm=rms_norm,
        add_rms_norm=_add_rms_norm,
        rope=rope,
        silu_mul=silu_mul,
        gelu_tanh_mul=gelu_tanh_mul,
        rope_write_kv=_rope_write_kv,
        route=route,
        experts=experts,
        penalise=penalise,
        sample=sample_rows,
        logprobs=logprobs,
        paged_attention=TritonAttention(),
        latent_attention=latent_attention,
        select_tokens=select_tokens,
        selected_attention=selected_attention,
        fixed_step=TritonFixedStep,
        keeps=kept(device),
    )


def invariant_triton_ops(device: torch.device) -> Ops:
    """Return operations that give a token the same bits whatever it is batched with and however its prompt is chunked: nothing
    that a kernel is chosen, compiled or cut by depends on the number of rows or on other sequences' lengths. Packed weights'
    kernels do not promise that."""
    return invariant_ops_split_at(device, _SPLIT_TOKENS)


def invariant_ops_split_at(device: torch.device, split_tokens: int) -> Ops:
    """The same, with contexts split at multiples of `split_tokens`."""
    return replace(
        triton_ops(device),
        linear=gemm.linear,
        rounds=no_rounding,
        feed_forward=reference.feed_forward,
        fixed_step=partial(TritonFixedStep, split_tokens=split_tokens),
        keeps=frozenset(),
        paged_attention=TritonAttention(split_tokens),
        experts=partial(experts, block_m=_EXPERT_ROWS),
        latent_attention=partial(invariant_latent_attention, split_tokens=split_tokens),
        selected_attention=partial(invariant_selected_attention, split_tokens=split_tokens),
    )
