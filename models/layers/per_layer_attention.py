"""Attention of models whose layers differ in the size and the number of their KV heads, and in whose keys and values they read
(Gemma 4). Values pass a norm without weights, and a layer's values may be its keys before their norm and rotation."""

import torch
from torch import Tensor

from kernels.collectives import Collectives
from kernels.ops import HeadNorms, KVLayer, Ops
from kernels.packed import joined
from kernels.rounding import Activations
from models.formats.weight_source import WeightSource
from models.layers.attention import ForwardStep
from models.spec.model_spec import ModelSpec


class SizedAttention:
    """`models.layers.attention.AttentionLayer`, of a model that has `ModelSpec.kv`."""

    def __init__(
        self,
        spec: ModelSpec,
        index: int,
        checkpoint: WeightSource,
        prefix: str,
        ops: Ops,
        collectives: Collectives,
    ) -> None:
        assert spec.kv is not None
        self._ops, self._sum = ops, collectives.sum_partial
        self._scale, self._window, self._eps = spec.attention_scale, spec.windows[index], spec.norm_eps
        self._owns, self._values_from_keys = spec.kv.owns(index), spec.kv.keys_are_values[index]
        self._head_dim = spec.heads_of(index).head_dim
        sizes = spec.kv.projections(index, spec.num_heads)
        names = {f"{prefix}{name}_proj": (size, spec.hidden_size) for name, size in sizes.items()}
        parts = [checkpoint.matrix(f"{name}.weight", shape) for name, shape in names.items()]
        biases = [f"{name}.bias" for name in names if spec.qkv_bias]
        rows, dtype, beside = joined(parts, checkpoint.dtype), checkpoint.dtype, checkpoint.adapters.beside
        self.takes, self._made = ops.rounds(rows), ops.pack(rows, dtype)
        taken = [checkpoint.take(bias, (size,)) for bias, size in zip(biases, sizes.values(), strict=False)]
        self._bias = torch.cat(taken) if taken else None
        self._adapters = beside(names)
        self._heads = len(checkpoint.held(f"{prefix}q_proj.weight", spec.num_heads))
        shape = spec.hidden_size, sizes["q"]
        self._out = ops.pack(checkpoint.matrix(f"{prefix}o_proj.weight", shape), dtype)
        self._out_adapters = beside({f"{prefix}o_proj": shape})
        self._out_bias = checkpoint.take(f"{prefix}o_proj.bias", shape[:1]) if spec.out_bias else None
        self._ones = torch.ones(self._head_dim, device=checkpoint.device)
        self._norms = self._read_norms(checkpoint, prefix)
        unread = [] if self._owns else [f"{name}_{what}" for name in "kv" for what in ("proj", "norm")]
        checkpoint.ignore(*(f"{prefix}{name}.weight" for name in unread))

    def _read_norms(self, checkpoint: WeightSource, prefix: str) -> HeadNorms:
        names = "qk" if self._owns else "q"
        weights = [
            checkpoint.take(f"{prefix}{name}_norm.weight", (self._head_dim,), torch.float32) for name in names
        ]
        return weights[0], weights[-1], self._eps

    def __call__(self, x: Activations, kv_layer: KVLayer, step: ForwardStep) -> Tensor:
        ops, adapters = self._ops, step.meta.adapters
        made = ops.linear(x, self._made, self._bias)
        self._adapters.add(made, x, adapters, ops.linear)
        q = self._write(made, kv_layer, step) if self._owns else self._queries(made, step)
        attended = ops.paged_attention(q, kv_layer, step.meta, self._scale, self._window, 0.0, None)
        attended = attended.flatten(1)
        out = ops.linear(attended, self._out, None)
        self._out_adapters.add(out, attended, adapters, ops.linear)
        out = self._sum(out)
        return out if self._out_bias is None else out + self._out_bias

    def _queries(self, made: Tensor, step: ForwardStep) -> Tensor:
        heads = made.view(len(made), -1, self._head_dim)
        normed = self._ops.rms_norm(heads, self._norms[0], self._eps)
        return self._ops.rope(normed, step.rotation.cos, step.rotation.sin)

    def _write(self, made: Tensor, kv_layer: KVLayer, step: ForwardStep) -> Tensor:
        """Return the queries, with the keys and values behind them in the pool."""
        num_rows, dim = len(made), self._head_dim
        queries, kv_size = self._heads * dim, kv_layer.shape[2] * dim
        keys = made[:, queries : queries + kv_size]
        values = keys if self._values_from_keys else made[:, queries + kv_size :]
        normed = self._ops.rms_norm(values.reshape(-1, dim), self._ones, self._eps)
        qkv = torch.cat((made[:, : queries + kv_size], normed.view(num_rows, kv_size)), 1)
        rotation = step.rotation
        return self._ops.rope_write_kv(qkv, rotation.cos, rotation.sin, self._norms, kv_layer, step.meta)
