"""`Ops` of the Triton kernels. Dense products are left to cuBLAS, what has no kernel to PyTorch."""

from dataclasses import replace
from functools import partial

from torch import Tensor

from kernels.moe import route, top_stable
from kernels.ops import AttentionMeta, Ops
from kernels.ref import reference_ops
from kernels.triton.activation import gelu_tanh_mul, silu_mul
from kernels.triton.attention import TritonAttention
from kernels.triton.gemm import linear
from kernels.triton.grouped import experts
from kernels.triton.latent import invariant_latent_attention, latent_attention
from kernels.triton.norm import rms_norm
from kernels.triton.rope import rope, write_kv

_SPLIT_TOKENS = 1024
_EXPERT_ROWS = 64


def _write_kv(k: Tensor, v: Tensor, kv_layer: Tensor, meta: AttentionMeta) -> None:
    write_kv(k, v, kv_layer, meta.slots)


def triton_ops() -> Ops:
    return replace(
        reference_ops(),
        rms_norm=rms_norm,
        rope=rope,
        silu_mul=silu_mul,
        gelu_tanh_mul=gelu_tanh_mul,
        write_kv=_write_kv,
        experts=experts,
        paged_attention=TritonAttention(),
        latent_attention=latent_attention,
    )


def invariant_triton_ops() -> Ops:
    """The same bits for a token whatever it is batched with and however its prompt is chunked: nothing that a kernel is chosen,
    compiled or cut by depends on the number of rows or on other sequences' lengths."""
    return replace(
        triton_ops(),
        linear=linear,
        paged_attention=TritonAttention(_SPLIT_TOKENS),
        route=partial(route, top=top_stable),
        experts=partial(experts, block_m=_EXPERT_ROWS),
        latent_attention=partial(invariant_latent_attention, split_tokens=_SPLIT_TOKENS),
    )
