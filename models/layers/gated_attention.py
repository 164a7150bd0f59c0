"""Attention whose heads' results pass gates, and of whose heads only the leading dimensions may be rotated (Qwen3-Next)."""

import torch
from torch import Tensor

from kernels.collectives import Collectives
from kernels.ops import KVLayer, Ops
from kernels.rounding import Activations, Rounding
from models.formats.weight_source import WeightSource
from models.layers.attention import ForwardStep
from models.layers.rope import rotation_order
from models.spec.model_spec import ModelSpec


class GatedAttention:
    """`models.layers.attention.AttentionLayer`. Rows of queries' and keys' weights are put in the order in which halves are
    rotated, so they are floats here."""

    takes: Rounding | None = None

    def __init__(
        self,
        spec: ModelSpec,
        index: int,
        checkpoint: WeightSource,
        prefix: str,
        ops: Ops,
        collectives: Collectives,
    ) -> None:
        self._ops, self._sum, self._index = ops, collectives.sum_partial, index
        self._head_dim, self._scale, self._window = spec.head_dim, spec.attention_scale, spec.windows[index]
        heads, kv_heads, dim = spec.num_heads, spec.num_kv_heads, spec.head_dim
        order = rotation_order(spec)
        order = slice(None) if order is None else order

        def rows(name: str, count: int) -> Tensor:
            shape = (count * dim, spec.hidden_size)
            stored = checkpoint.take(f"{prefix}{name}_proj.weight", shape)
            bias = checkpoint.take(f"{prefix}{name}_proj.bias", shape[:1])[:, None] if spec.qkv_bias else None
            return (stored if bias is None else torch.cat((stored, bias), 1)).unflatten(0, (-1, dim))

        q_and_gate = rows("q", 2 * heads).unflatten(0, (-1, 2))
        q, gate = q_and_gate[:, 0], q_and_gate[:, 1]
        parts = [q[:, order], rows("k", kv_heads)[:, order], rows("v", kv_heads)]
        self._qkv, self._qkv_bias = _split(spec, torch.cat(parts).flatten(0, 1))
        self._gate, self._gate_bias = _split(spec, gate.flatten(0, 1))
        self._qkv, self._gate = (ops.pack(part, checkpoint.dtype) for part in (self._qkv, self._gate))
        q_norm, k_norm = (
            checkpoint.take(f"{prefix}{name}_norm.weight", (dim,), torch.float32)[order] for name in "qk"
        )
        self._norms = (q_norm + spec.unit_offset_norm, k_norm + spec.unit_offset_norm, spec.norm_eps)
        out = checkpoint.matrix(f"{prefix}o_proj.weight", (spec.hidden_size, heads * dim))
        self._out = ops.pack(out, checkpoint.dtype)
        self._out_bias = (
            checkpoint.take(f"{prefix}o_proj.bias", (spec.hidden_size,)) if spec.out_bias else None
        )

    def __call__(self, x: Activations, kv_layer: KVLayer, step: ForwardStep) -> Tensor:
        ops = self._ops
        qkv = ops.linear(x, self._qkv, self._qkv_bias)
        q = ops.rope_write_kv(qkv, step.rotation.cos, step.rotation.sin, self._norms, kv_layer, step.meta)
        if step.on_layer is not None:
            step.on_layer(self._index)
        attended = ops.paged_attention(q, kv_layer, step.meta, self._scale, self._window, 0.0, None)
        gate = ops.by_rows(torch.sigmoid, ops.linear(x, self._gate, self._gate_bias))
        out = self._sum(ops.linear(attended.flatten(1) * gate, self._out, None))
        return out if self._out_bias is None else out + self._out_bias


def _split(spec: ModelSpec, rows: Tensor) -> tuple[Tensor, Tensor | None]:
    """Return weights, and the biases that may stand behind them."""
    if not spec.qkv_bias:
        return rows.contiguous(), None
    return rows[:, :-1].contiguous(), rows[:, -1].contiguous()
