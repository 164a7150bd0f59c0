"""Multi-head latent attention: the cache holds one latent for each token, from which the heads' keys and values can be made."""

from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.collectives import Collectives
from kernels.ops import KVLayer, Latents, Ops
from kernels.packed import LinearWeight, reordered
from kernels.rounding import Activations, Rounding
from models.formats.weight_source import WeightSource
from models.layers.attention import ForwardStep
from models.layers.rope import halves_order
from models.layers.sparse_attention import ChosenTokens
from models.spec.latent_spec import MlaSpec
from models.spec.model_spec import ModelSpec

_EPS = 1e-6
"""The epsilon of the norms inside attention, whatever the model's other norms use."""


@dataclass(frozen=True, slots=True)
class _Down:
    """A projection to a low rank, which is normalised there."""

    weight: LinearWeight
    bias: Tensor | None
    norm: Tensor


class LatentAttention:
    """Latent attention over as many heads as this rank has weights of. The latent is the same on every rank."""

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
        mla, hidden = spec.mla, spec.hidden_size
        assert mla is not None
        self._ops, self._collectives, self._index, self._mla = ops, collectives, index, mla
        self._scale = spec.attention_scale
        self._q_down, self._q = _read_queries(spec, mla, checkpoint, prefix, ops)
        names = ("kv_a_proj_with_mqa", "kv_a_layernorm")
        self._kv_down = _read_down(spec, checkpoint, prefix, names, mla.kv_rank, more=mla.rope_dim, ops=ops)
        up = checkpoint.take(
            f"{prefix}kv_b_proj.weight", (spec.num_heads * (mla.nope_dim + mla.value_dim), mla.kv_rank)
        ).unflatten(0, (-1, mla.nope_dim + mla.value_dim))
        self._k_up, self._v_up = up[:, : mla.nope_dim].contiguous(), up[:, mla.nope_dim :].contiguous()
        out = checkpoint.matrix(f"{prefix}o_proj.weight", (hidden, spec.num_heads * mla.value_dim))
        self._out = ops.pack(out, checkpoint.dtype)
        self._out_bias = checkpoint.take(f"{prefix}o_proj.bias", (hidden,)) if spec.out_bias else None
        self._chosen = None
        if mla.index is not None:
            self._chosen = ChosenTokens(
                spec,
                index,
                checkpoint,
                f"{prefix}indexer.",
                ops,
                scale=self._scale,
                k_up=self._k_up,
                v_up=self._v_up,
            )

    def __call__(self, x: Activations, kv_layer: KVLayer, step: ForwardStep) -> Tensor:
        assert isinstance(x, Tensor), "what takes it is floats"
        assert isinstance(kv_layer, Latents), "its pool has latents"
        ops, latent = self._ops, self._latent(x, step)
        if self._chosen is not None:
            latent = self._chosen.with_keys(latent, x, step)
        ops.write_latent(latent, kv_layer, step.meta)
        if step.on_layer is not None:
            step.on_layer(self._index)
        attended = self._attended(x, kv_layer, step)
        out = self._collectives.sum_partial(ops.linear(attended.flatten(1), self._out, None))
        return out if self._out_bias is None else out + self._out_bias

    def _attended(self, x: Tensor, kv_layer: Latents, step: ForwardStep) -> Tensor:
        """(T, hidden) -> (T, heads, value_dim)."""
        source = self._query_latent(x)
        q = self._queries(source, step)
        if self._chosen is not None:
            return self._chosen.attend(x, source, q, kv_layer, step)
        return self._ops.latent_attention(q, kv_layer, step.meta, self._scale, self._k_up, self._v_up)

    def _latent(self, x: Tensor, step: ForwardStep) -> Tensor:
        """(T, hidden) -> (T, kv_rank + rope_dim)."""
        ops, down, rank = self._ops, self._kv_down, self._mla.kv_rank
        both = ops.linear(x, down.weight, down.bias)
        rotated = ops.rope(both[:, None, rank:], step.rotation.cos, step.rotation.sin)[:, 0]
        return torch.cat((ops.rms_norm(both[:, :rank], down.norm, _EPS), rotated), -1)

    def _query_latent(self, x: Tensor) -> Tensor:
        """(T, hidden) -> (T, q_rank), or x where queries are made from it at once."""
        ops, down = self._ops, self._q_down
        return x if down is None else ops.rms_norm(ops.linear(x, down.weight, down.bias), down.norm, _EPS)

    def _queries(self, source: Tensor, step: ForwardStep) -> Tensor:
        """`_query_latent` -> (T, heads, nope_dim + rope_dim)."""
        ops, mla = self._ops, self._mla
        q = ops.linear(source, self._q, None).unflatten(-1, (-1, mla.nope_dim + mla.rope_dim))
        rotated = ops.rope(q[..., mla.nope_dim :], step.rotation.cos, step.rotation.sin)
        q, factors = torch.cat((q[..., : mla.nope_dim], rotated), -1), step.rotation.query_factors
        return q if factors is None else (q * factors).to(q.dtype)


def _read_queries(
    spec: ModelSpec, mla: MlaSpec, checkpoint: WeightSource, prefix: str, ops: Ops
) -> tuple[_Down | None, LinearWeight]:
    dim = mla.nope_dim + mla.rope_dim
    if mla.q_rank:
        down = _read_down(
            spec, checkpoint, prefix, ("q_a_proj", "q_a_layernorm"), mla.q_rank, more=0, ops=ops
        )
        weight = checkpoint.matrix(f"{prefix}q_b_proj.weight", (spec.num_heads * dim, mla.q_rank))
    else:
        down = None
        weight = checkpoint.matrix(f"{prefix}q_proj.weight", (spec.num_heads * dim, spec.hidden_size))
    if mla.interleaved:
        heads = torch.arange(weight.shape[0]).unflatten(0, (-1, dim))
        order = heads[:, halves_order(mla.nope_dim, mla.rope_dim)].flatten()
        weight = reordered(weight, order, checkpoint.dtype)
    return down, ops.pack(weight, checkpoint.dtype)


def _read_down(
    spec: ModelSpec,
    checkpoint: WeightSource,
    prefix: str,
    names: tuple[str, str],
    rank: int,
    *,
    more: int,
    ops: Ops,
) -> _Down:
    """Read a projection down. `more` of its outputs are rotated and pass no norm."""
    projection, norm = names
    weight = checkpoint.matrix(f"{prefix}{projection}.weight", (rank + more, spec.hidden_size))
    bias = checkpoint.take(f"{prefix}{projection}.bias", (rank + more,)) if spec.qkv_bias else None
    if more and spec.mla is not None and spec.mla.interleaved:
        order = torch.tensor(halves_order(rank, more))
        weight = reordered(weight, order, checkpoint.dtype)
        bias = None if bias is None else bias[order]
    packed = ops.pack(weight, checkpoint.dtype)
    return _Down(packed, bias, checkpoint.take(f"{prefix}{norm}.weight", (rank,), torch.float32))
