"""Attention with keys and values per head, and what all attention layers of a step share."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from kernels.joins import Joins
from kernels.ops import AttentionMeta, Ops
from models.spec import ModelSpec
from models.weights import Checkpoint


@dataclass(frozen=True, slots=True)
class Step:
    """One forward pass, as attention layers see it."""

    meta: AttentionMeta
    cos: Tensor
    """(T, rotated dimensions)"""
    sin: Tensor
    on_layer: Callable[[int], None] | None
    """Called with a layer's index as soon as its KV is all in the pool."""


class AttentionLayer(Protocol):
    def __call__(self, x: Tensor, kv_layer: Tensor, step: Step) -> Tensor:
        """(T, hidden) -> (T, hidden), normalised before and not yet added to the residual. Writes the step's KV to `kv_layer`."""
        ...


class Attention:
    """Grouped-query attention over as many heads as this rank has weights of."""

    def __init__(
        self, spec: ModelSpec, index: int, checkpoint: Checkpoint, prefix: str, ops: Ops, joins: Joins
    ) -> None:
        self._ops, self._joins, self._index = ops, joins, index
        self._head_dim, self._eps = spec.head_dim, spec.norm_eps
        self._scale, self._window = spec.attention_scale, spec.windows[index]
        self._soft_cap = spec.attention_soft_cap
        self._read_projections(spec, checkpoint, prefix)
        self._q_norm = self._k_norm = self._sinks = None
        if spec.qk_norm:
            self._q_norm = checkpoint.take(f"{prefix}q_norm.weight", (spec.head_dim,), torch.float32)
            self._k_norm = checkpoint.take(f"{prefix}k_norm.weight", (spec.head_dim,), torch.float32)
        if spec.sinks:
            self._sinks = checkpoint.take(f"{prefix}sinks", (spec.num_heads,), torch.float32)

    def _read_projections(self, spec: ModelSpec, checkpoint: Checkpoint, prefix: str) -> None:
        hidden, dim = spec.hidden_size, spec.head_dim
        sizes = {"q": spec.num_heads * dim, "k": spec.num_kv_heads * dim, "v": spec.num_kv_heads * dim}
        parts = [
            checkpoint.take(f"{prefix}{name}_proj.weight", (size, hidden)) for name, size in sizes.items()
        ]
        self._heads, self._kv_heads = parts[0].shape[0] // dim, parts[1].shape[0] // dim
        self._qkv, self._qkv_bias = torch.cat(parts), None
        if spec.qkv_bias:
            self._qkv_bias = torch.cat(
                [checkpoint.take(f"{prefix}{name}_proj.bias", (size,)) for name, size in sizes.items()]
            )
        self._out = checkpoint.take(f"{prefix}o_proj.weight", (hidden, sizes["q"]))
        self._out_bias = checkpoint.take(f"{prefix}o_proj.bias", (hidden,)) if spec.out_bias else None

    def __call__(self, x: Tensor, kv_layer: Tensor, step: Step) -> Tensor:
        ops, heads = self._ops, self._heads
        qkv = ops.linear(x, self._qkv, self._qkv_bias).view(-1, heads + 2 * self._kv_heads, self._head_dim)
        q, k = self._rotated(qkv, step)
        ops.write_kv(k, qkv[:, heads + self._kv_heads :], kv_layer, step.meta)
        if step.on_layer is not None:
            step.on_layer(self._index)
        attended = ops.paged_attention(
            q, kv_layer, step.meta, self._scale, self._window, self._soft_cap, self._sinks
        )
        out = self._joins.sum_partial(
            ops.linear(attended.reshape(-1, heads * self._head_dim), self._out, None)
        )
        return out if self._out_bias is None else out + self._out_bias

    def _rotated(self, qkv: Tensor, step: Step) -> tuple[Tensor, Tensor]:
        """(T, heads + 2 kv_heads, D) -> q (T, heads, D), k (T, kv_heads, D)"""
        ops, heads, stop = self._ops, self._heads, self._heads + self._kv_heads
        if self._q_norm is None or self._k_norm is None:
            rotated = ops.rope(qkv[:, :stop], step.cos, step.sin)
            return rotated[:, :heads], rotated[:, heads:]
        q = ops.rms_norm(qkv[:, :heads], self._q_norm, self._eps)
        k = ops.rms_norm(qkv[:, heads:stop], self._k_norm, self._eps)
        return ops.rope(q, step.cos, step.sin), ops.rope(k, step.cos, step.sin)
