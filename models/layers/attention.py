"""Attention with keys and values for each head, and what all attention layers of a step share."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from kernels.attention.chunks import chunked
from kernels.collectives import ONE_RANK, Collectives
from kernels.ops import AttentionMeta, AttentionPart, HeadNorms, KVLayer, Ops
from kernels.packed import joined, reordered
from kernels.rounding import Activations, Rounding
from models.formats.weight_source import WeightSource
from models.layers.projection_norms import ProjectionNorms
from models.layers.rope import Rotation, rotation_order
from models.spec.model_spec import ModelSpec, RopeSpec


@dataclass(frozen=True, slots=True)
class ForwardStep:
    """One forward pass, as attention layers see it."""

    meta: AttentionMeta
    rotation: Rotation
    on_layer: Callable[[int], None] | None
    """Called with a layer's index as soon as its KV is all in the pool."""
    chosen: list[Tensor] = field(default_factory=list[Tensor])
    """The slots (N, top_k) int64 of what the last layer that chooses tokens has chosen, for the queries that see more than
    `top_k`. Empty before it, and where no query does."""
    inputs: Tensor | None = None
    """(T, layers, size): what each layer of the model takes of each token beside the residual, where they do."""
    tokens: Tensor | None = None
    """(T,) int64; None behind the first stage, and for inputs that are no tokens."""


class AttentionLayer(Protocol):
    takes: Rounding | None
    """What its input is rounded to; None where it is not, or not for all that take it."""

    def __call__(self, x: Activations, kv_layer: KVLayer, step: ForwardStep) -> Tensor:
        """(T, hidden) -> (T, hidden), normalised before, as `takes` says, and not yet added to the residual. Writes the step's KV
        to `kv_layer`."""
        ...


class Attention:
    """Grouped-query attention over as many heads as this rank has weights of."""

    def __init__(
        self,
        spec: ModelSpec,
        index: int,
        checkpoint: WeightSource,
        prefix: str,
        ops: Ops,
        collectives: Collectives,
        *,
        input_size: int = 0,
    ) -> None:
        """`input_size`: of the rows that queries, keys and values are made from; 0: the hidden size."""
        self._ops, self._collectives, self._index = ops, collectives, index
        self._head_dim = spec.head_dim
        self._scale, self._window = spec.attention_scale, spec.windows[index]
        self._soft_cap = spec.attention_soft_cap
        self._chunk = spec.chunks[index] if spec.chunks else 0
        self._grows = spec.query_temperature is not None
        self._read_projections(spec, checkpoint, prefix, input_size or spec.hidden_size)
        self._norm_all = self._sinks = None
        if spec.qk_norm == "projection":
            self._norm_all = ProjectionNorms(spec, checkpoint, prefix, ops, collectives)
        rope = spec.layer_ropes[index] if spec.layer_ropes else spec.rope
        self._norms, self._stretch = _head_norms(spec, rope, checkpoint, prefix)
        if spec.sinks:
            self._sinks = checkpoint.take(f"{prefix}sinks", (spec.num_heads,), torch.float32)

    def _read_projections(
        self, spec: ModelSpec, checkpoint: WeightSource, prefix: str, input_size: int
    ) -> None:
        dim = spec.head_dim
        sizes = {"q": spec.num_heads * dim, "k": spec.num_kv_heads * dim, "v": spec.num_kv_heads * dim}
        stored = {"qkv": sum(sizes.values())} if spec.fused_qkv else sizes
        parts = [
            checkpoint.matrix(f"{prefix}{name}_proj.weight", (size, input_size))
            for name, size in stored.items()
        ]
        self._heads = len(checkpoint.held(f"{prefix}q_proj.weight", spec.num_heads))
        qkv, self._qkv_bias = joined(parts, checkpoint.dtype), None
        if spec.qkv_bias:
            self._qkv_bias = torch.cat(
                [checkpoint.take(f"{prefix}{name}_proj.bias", (size,)) for name, size in stored.items()]
            )
        rows = None
        if (order := rotation_order(spec)) is not None:
            rows = _turned_rows(order, qkv.shape[0], self._heads)
            qkv = reordered(qkv, rows, checkpoint.dtype)
            self._qkv_bias = None if self._qkv_bias is None else self._qkv_bias[rows]
        beside = checkpoint.adapters.beside
        modules = {f"{prefix}{name}_proj": (size, input_size) for name, size in stored.items()}
        self._qkv_adapters = beside(modules, rows)
        self.takes, self._qkv = self._ops.rounds(qkv), self._ops.pack(qkv, checkpoint.dtype)
        out = checkpoint.matrix(f"{prefix}o_proj.weight", (spec.hidden_size, sizes["q"]))
        self._out = self._ops.pack(out, checkpoint.dtype)
        self._out_adapters = beside({f"{prefix}o_proj": (spec.hidden_size, sizes["q"])})
        self._out_bias = (
            checkpoint.take(f"{prefix}o_proj.bias", (spec.hidden_size,)) if spec.out_bias else None
        )

    def __call__(self, x: Activations, kv_layer: KVLayer, step: ForwardStep) -> Tensor:
        ops, heads, rotation = self._ops, self._heads, step.rotation
        qkv, adapters = ops.linear(x, self._qkv, self._qkv_bias), step.meta.adapters
        self._qkv_adapters.add(qkv, x, adapters, ops.linear)
        if self._norm_all is not None:
            qkv = self._norm_all(qkv)
        q = ops.rope_write_kv(qkv, rotation.cos, rotation.sin, self._norms, kv_layer, step.meta)
        if step.on_layer is not None:
            step.on_layer(self._index)
        for factors in (self._stretch, rotation.query_factors):
            if factors is not None:
                q = (q * factors).to(q.dtype)
        meta = chunked(step.meta, self._chunk, kv_layer.shape[3]) if self._chunk else step.meta
        attended = ops.paged_attention(
            q, kv_layer, meta, self._scale, self._window, self._soft_cap, self._sinks
        )
        attended = attended.reshape(-1, heads * self._head_dim)
        out = ops.linear(attended, self._out, None)
        self._out_adapters.add(out, attended, adapters, ops.linear)
        out = self._collectives.sum_partial(out)
        return out if self._out_bias is None else out + self._out_bias

    def part(self, norm: Tensor, norm_behind: Tensor | None, rotation: int) -> AttentionPart | None:
        """Return the layer's half as data, with the norms before and behind it and the number of its rotation. None where ranks
        share it, or where it is more than what that says."""
        meets = self._collectives.sum_partial is not ONE_RANK.sum_partial
        if meets or self._norm_all is not None or self._chunk or self._grows or self._stretch is not None:
            return None
        return AttentionPart(
            norm=norm,
            qkv=self._qkv,
            qkv_bias=self._qkv_bias,
            head_dim=self._head_dim,
            head_norms=self._norms,
            rotation=rotation,
            scale=self._scale,
            window=self._window,
            soft_cap=self._soft_cap,
            sinks=self._sinks,
            out=self._out,
            out_bias=self._out_bias,
            norm_behind=norm_behind,
        )


def _head_norms(
    spec: ModelSpec, rope: RopeSpec, checkpoint: WeightSource, prefix: str
) -> tuple[HeadNorms | None, Tensor | None]:
    """Return the norms of each head's queries and keys before they are rotated, and (head_dim,) float32 by which queries are
    multiplied behind that; None for nothing."""

    def weight(name: str) -> Tensor:
        return checkpoint.take(f"{prefix}{name}.weight", (spec.head_dim,), torch.float32)

    ones = torch.ones(spec.head_dim, device=checkpoint.device)
    match spec.qk_norm:
        case "head":
            q_norm, k_norm = (weight(f"{name}_norm") + spec.unit_offset_norm for name in "qk")
            if (order := rotation_order(spec)) is not None:
                q_norm, k_norm = q_norm[order], k_norm[order]
            return (q_norm, k_norm, spec.norm_eps), None
        case "unit" if rope.kind != "none":  # before rotating as behind it: that keeps lengths
            return (ones, ones, spec.norm_eps), None
        case "rotated":
            # A score is a sum over dimensions, so that queries may have the weights of keys' norm, too.
            return (ones, ones, spec.norm_eps), weight("query_layernorm") * weight("key_layernorm")
        case _:
            return None, None


def _turned_rows(order: Tensor, num_rows: int, num_heads: int) -> Tensor:
    """(head_dim,) -> (num_rows,) int64: that order in each head of queries and keys, and values as they are."""
    dim = len(order)
    turned = (num_rows // dim + num_heads) // 2
    rows = torch.arange(num_rows).unflatten(0, (-1, dim))
    return torch.cat((rows[:turned, order], rows[turned:])).flatten()
