"""Gated activations: SiLU or GELU (tanh approximation) of one half times the other, with quantisation for each token.

Memory-bound. Floor: (T, 2N) is read once and (T, N) written once."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.scaled_kv import LARGEST
from kernels.triton.platform import warps_for
from kernels.triton.quantise import quantise_rows

_BLOCK = 1024


@triton.jit
def gated(gate, up, GELU: tl.constexpr):
    """Both float32. tanh(z) = 2 sigmoid(2z) - 1, hence the GELU as a sigmoid."""
    if GELU:
        inner = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)
        return gate * tl.sigmoid(inner) * up
    return gate * tl.sigmoid(gate) * up


@triton.jit
def _gated_kernel(x, out, N: tl.constexpr, BLOCK: tl.constexpr, GELU: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < N
    gate = tl.load(x + row * 2 * N + column, mask, 0.0).to(tl.float32)
    up = tl.load(x + row * 2 * N + N + column, mask, 0.0).to(tl.float32)
    tl.store(out + row * N + column, gated(gate, up, GELU).to(out.dtype.element_ty), mask)


@triton.jit
def _gated_quantised_kernel(
    x, out, scales, N: tl.constexpr, BLOCK: tl.constexpr, GELU: tl.constexpr, LARGEST: tl.constexpr
):
    """A whole row, kept in registers until its largest magnitude is known."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)[None, :]
    mask = column < N
    gate = tl.load(x + row * 2 * N + column, mask, 0.0).to(tl.float32)
    up = tl.load(x + row * 2 * N + N + column, mask, 0.0).to(tl.float32)
    values, scale = quantise_rows(gated(gate, up, GELU), LARGEST, out.dtype.element_ty)
    tl.store(scales + row + tl.arange(0, 1), scale)
    tl.store(out + row * N + column, values.to(out.dtype.element_ty), mask)


def silu_mul(x: Tensor) -> Tensor:
    """(T, 2N), contiguous -> (T, N)"""
    return _gate(x, False)


def gelu_tanh_mul(x: Tensor) -> Tensor:
    """(T, 2N), contiguous -> (T, N)"""
    return _gate(x, True)


def _gate(x: Tensor, gelu: bool) -> Tensor:
    assert x.is_contiguous()
    num_rows, size = x.shape[0], x.shape[1] // 2
    out = torch.empty((num_rows, size), dtype=x.dtype, device=x.device)
    if num_rows:
        block = min(_BLOCK, triton.next_power_of_2(size))
        _gated_kernel[(num_rows, triton.cdiv(size, block))](
            x, out, N=size, BLOCK=block, GELU=gelu, num_warps=4
        )
    return out


def gated_quantised(x: Tensor, gelu: bool, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """(T, 2N), contiguous -> ((T, N) in `dtype` (float8_e4m3fn or int8), (T,) float32 to multiply it with)."""
    assert x.is_contiguous()
    num_rows, size = x.shape[0], x.shape[1] // 2
    out = torch.empty((num_rows, size), dtype=dtype, device=x.device)
    scales = torch.empty(num_rows, dtype=torch.float32, device=x.device)
    block = triton.next_power_of_2(size)
    _gated_quantised_kernel[(num_rows,)](
        x,
        out,
        scales,
        N=size,
        BLOCK=block,
        GELU=gelu,
        LARGEST=LARGEST[dtype],
        num_warps=warps_for(2 * block),
    )
    return out, scales
