"""What a layer does between its products, by native kernels (`src/elementwise.h`): norms, gates, rotations, and writing KV.

In float32; what has another dtype, or does not lie as a kernel reads it, goes to PyTorch's operations. A row's result has the
same bits whatever other rows come with it."""

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from kernels.cpu import library
from kernels.cpu.attention import NUMBERS
from kernels.cpu.pages import result
from kernels.ops import AttentionMeta, HeadNorms, KVLayer, Ops
from kernels.torch.reference import RmsNorm, write_kv

SILU, GELU = 0, 1
"""As `src/api.cpp` numbers gates."""
Isa = library.Isa


def with_native_rows(ops: Ops) -> Ops:
    """Return `ops` with these operations, where there are native kernels."""
    if library.native() is None:
        return ops
    isa = library.fastest_exact()
    return replace(
        ops,
        rms_norm=norm_with(isa, ops.rms_norm),
        add_rms_norm=add_norm_with(isa, ops.add_rms_norm),
        silu_mul=gate_with(isa, SILU, ops.silu_mul),
        gelu_tanh_mul=gate_with(isa, GELU, ops.gelu_tanh_mul),
        rope_write_kv=turn_with(library.fastest_of_bfloat16() or isa, ops.rope_write_kv),
    )


def norm_with(isa: Isa, otherwise: RmsNorm) -> RmsNorm:
    """Return `Ops.rms_norm`."""

    def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
        if not (_is_plain(x) and _is_row(weight, x)):
            return otherwise(x, weight, eps)
        out = result(*x.shape)
        size = x.shape[-1]
        library.loaded().baton_norm(
            isa, x.data_ptr(), None, weight.data_ptr(), eps, x.numel() // size, size, None, out.data_ptr(),
            torch.get_num_threads(),
        )  # fmt: skip
        return out

    return rms_norm


def add_norm_with(
    isa: Isa, otherwise: Callable[[Tensor, Tensor, Tensor, float], tuple[Tensor, Tensor]]
) -> Callable[[Tensor, Tensor, Tensor, float], tuple[Tensor, Tensor]]:
    """Return `Ops.add_rms_norm`."""

    def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        if not (_is_plain(x) and _is_plain(residual) and x.shape == residual.shape and _is_row(weight, x)):
            return otherwise(x, residual, weight, eps)
        total, out = result(*x.shape), result(*x.shape)
        size = x.shape[-1]
        library.loaded().baton_norm(
            isa, x.data_ptr(), residual.data_ptr(), weight.data_ptr(), eps, x.numel() // size, size,
            total.data_ptr(), out.data_ptr(), torch.get_num_threads(),
        )  # fmt: skip
        return total, out

    return add_rms_norm


def gate_with(isa: Isa, gate: int, otherwise: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """Return `Ops.silu_mul` or `Ops.gelu_tanh_mul`."""

    def gated(x: Tensor) -> Tensor:
        if not (_is_plain(x) and x.shape[-1] % 2 == 0):
            return otherwise(x)
        size = x.shape[-1] // 2
        out = result(*x.shape[:-1], size)
        library.loaded().baton_gate(
            isa, gate, x.data_ptr(), out.numel() // size, size, out.data_ptr(), torch.get_num_threads()
        )
        return out

    return gated


RopeWriteKV = Callable[[Tensor, Tensor, Tensor, HeadNorms | None, KVLayer, AttentionMeta], Tensor]


def turn_with(isa: Isa, otherwise: RopeWriteKV) -> RopeWriteKV:
    """Return `Ops.rope_write_kv`. Keys and values are rounded and stored by PyTorch for a pool of 8 bits, and for one of bfloat16
    without its instruction set."""

    def rope_write_kv(
        qkv: Tensor, cos: Tensor, sin: Tensor, norms: HeadNorms | None, kv_layer: KVLayer, meta: AttentionMeta
    ) -> Tensor:
        kv_heads, size = kv_layer.shape[2], kv_layer.shape[4]
        if not (_is_plain(qkv) and _turns(cos, qkv, size) and _turns(sin, qkv, size)):
            return otherwise(qkv, cos, sin, norms, kv_layer, meta)
        q_weight, k_weight, eps = (None, None, 0.0) if norms is None else norms
        if any(each is not None and not _is_plain(each) for each in (q_weight, k_weight)):
            return otherwise(qkv, cos, sin, norms, kv_layer, meta)
        rows, heads = len(qkv), qkv.shape[1] // size - 2 * kv_heads
        queries = result(rows, heads, size)
        pool = kv_layer if isinstance(kv_layer, Tensor) and _is_written(kv_layer, isa) else None
        number = 0 if pool is None else NUMBERS[pool.dtype]
        keys = None if pool is not None else torch.empty(rows, kv_heads, size)
        slots = checked_slots(meta, rows, kv_layer.shape[0] * kv_layer.shape[3])
        library.loaded().baton_turn(
            isa, qkv.data_ptr(), rows, heads, kv_heads, size, cos.data_ptr(), sin.data_ptr(), _at(q_weight), _at(k_weight),
            eps, queries.data_ptr(), _at(keys), number, _at(pool), slots.data_ptr(), kv_layer.shape[3],
            torch.get_num_threads(),
        )  # fmt: skip
        if keys is not None:
            write_kv(keys, qkv.view(rows, -1, size)[:, heads + kv_heads :], kv_layer, meta)
        return queries

    return rope_write_kv


def _at(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def _is_written(pool: Tensor, isa: Isa) -> bool:
    rounds = pool.dtype == torch.bfloat16 and isa.rounds_rows
    return _is_plain(pool) or (rounds and pool.is_contiguous())


def _is_plain(x: Tensor) -> bool:
    return x.dtype == torch.float32 and x.is_contiguous() and x.numel() > 0


def _is_row(weight: Tensor, x: Tensor) -> bool:
    return weight.shape == x.shape[-1:] and _is_plain(weight)


def _turns(angles: Tensor, qkv: Tensor, size: int) -> bool:
    return size % 2 == 0 and angles.shape == (len(qkv), size) and _is_plain(angles)


def checked_slots(meta: AttentionMeta, rows: int, num_slots: int) -> Tensor:
    """Return the step's slots, of a pool with so many; pointers know no bounds. They are looked at once for pools of one size.
    Raises ValueError."""
    key = "native slots", num_slots
    if (found := meta.cache.get(key)) is None:
        slots = meta.slots.contiguous()
        count = slots.numel()
        if (
            slots.dtype != torch.int64
            or library.loaded().baton_check_slots(slots.data_ptr(), count, num_slots) < count
        ):
            raise ValueError(f"native rotation takes slots below {num_slots} in int64")
        found = meta.cache[key] = slots
    if len(found) != rows:
        raise ValueError(f"native rotation takes {len(found)} tokens, as the step says, not {rows}")
    return found
