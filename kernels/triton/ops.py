"""`Ops` of the Triton kernels. Dense products are left to cuBLAS, what has no kernel to PyTorch."""

from dataclasses import replace

from torch import Tensor

from kernels.ops import AttentionMeta, Ops
from kernels.ref import reference_ops
from kernels.triton.activation import gelu_tanh_mul, silu_mul
from kernels.triton.attention import TritonAttention
from kernels.triton.grouped import experts
from kernels.triton.latent import latent_attention
from kernels.triton.norm import rms_norm
from kernels.triton.rope import rope, write_kv


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
