"""Gated activations: SiLU or GELU (tanh approximation) of one half times the other, and the same rounded to 8 bits.

Memory-bound. Floor: (T, 2N) is read once and (T, N) written once."""

import triton
import triton.language as tl
from torch import Tensor

from kernels.ops import Gate
from kernels.rounding import LARGEST, Rounded, Rounding
from kernels.triton.launching import await_inputs, launchable
from kernels.triton.platform import cdiv, next_power_of_2, warps_for
from kernels.triton.quantise import empty_rounded, quantise_groups

_BLOCK = 1024


@triton.jit
def gated(gate, up, GELU: tl.constexpr):
    """Both float32. tanh(z) = 2 sigmoid(2z) - 1, hence the GELU as a sigmoid."""
    if GELU:
        inner = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)
        return gate * tl.sigmoid(inner) * up
    return gate * tl.sigmoid(gate) * up


@launchable(overlaps=True)
def _gated_kernel(x, out, N: tl.constexpr, BLOCK: tl.constexpr, GELU: tl.constexpr):
    await_inputs()
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < N
    gate = tl.load(x + row * 2 * N + column, mask, 0.0).to(tl.float32)
    up = tl.load(x + row * 2 * N + N + column, mask, 0.0).to(tl.float32)
    tl.store(out + row * N + column, gated(gate, up, GELU).to(out.dtype.element_ty), mask)


@launchable(do_not_specialize=["num_rows"])
def _gated_rounded_kernel(
    x, out, scales, given, num_rows, N: tl.constexpr, BLOCK: tl.constexpr, GROUP: tl.constexpr, GELU: tl.constexpr,
    LARGEST: tl.constexpr,
):  # fmt: skip
    """A whole row, kept in registers until its largest magnitude is known."""
    row = tl.program_id(0).to(tl.int64) + tl.arange(0, 1)
    column = tl.arange(0, BLOCK)[None, :]
    mask = column < N
    gate = tl.load(x + row * 2 * N + column, mask, 0.0).to(tl.float32)
    up = tl.load(x + row * 2 * N + N + column, mask, 0.0).to(tl.float32)
    values = quantise_groups(
        gated(gate, up, GELU), given, scales, row, num_rows, N, 1, BLOCK, GROUP, LARGEST, out.dtype.element_ty
    )
    tl.store(out + row * N + column, values.to(out.dtype.element_ty), mask)


def silu_mul(x: Tensor) -> Tensor:
    """(T, 2N), contiguous -> (T, N)."""
    return _gate(x, False)


def gelu_tanh_mul(x: Tensor) -> Tensor:
    """(T, 2N), contiguous -> (T, N)."""
    return _gate(x, True)


def _gate(x: Tensor, gelu: bool) -> Tensor:
    assert x.is_contiguous()
    num_rows, size = x.shape[0], x.shape[1] // 2
    out = x.new_empty((num_rows, size))
    if num_rows:
        block = min(_BLOCK, next_power_of_2(size))
        _gated_kernel[(num_rows, cdiv(size, block))](x, out, N=size, BLOCK=block, GELU=gelu, num_warps=4)
    return out


def gated_rounded(x: Tensor, gate: Gate, how: Rounding) -> Rounded:
    """`Ops.gated_rounded`; x is contiguous."""
    assert x.is_contiguous()
    num_rows, size = x.shape[0], x.shape[1] // 2
    out = empty_rounded(num_rows, size, x.dtype, how, x.device)
    if num_rows:
        block = next_power_of_2(size)
        _gated_rounded_kernel[(num_rows,)](
            x, out.values, out.scales, how.scale, num_rows, N=size, BLOCK=block, GROUP=how.group or block,
            GELU=gate == "gelu_tanh", LARGEST=LARGEST[how.dtype], num_warps=warps_for(2 * block),
        )  # fmt: skip
    return out
