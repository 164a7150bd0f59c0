"""Latent attention in which each query chooses the tokens that it attends to (DeepSeek-AI, "DeepSeek-V3.2", arXiv:2512.02556, and
"GLM-5": layers may share the choice of an earlier one).

A small index beside attention scores all tokens that a query sees: its own queries, made from attention's, against one index key
of each token, which lies behind the token's latent in the cache. A query that sees no more than `top_k` tokens attends to all."""

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

from kernels.ops import AttentionMeta, Latents, Ops, Rows
from kernels.packed import LinearWeight
from models.formats.weight_source import WeightSource
from models.layers.attention import ForwardStep
from models.layers.rope import Rotation, halves_order
from models.spec.latent_spec import MlaSpec, TokenIndexSpec
from models.spec.model_spec import ModelSpec

_EPS = 1e-6
"""The epsilon of the norm of index keys."""


@dataclass(frozen=True, slots=True)
class _Part:
    """Some queries of a step."""

    rows: Rows
    meta: AttentionMeta | None
    """None where these are all queries: the step's own meta keeps the parts, and would keep itself."""


@dataclass(frozen=True, slots=True)
class _Parts:
    """A step's queries by what they see. One of the parts may be None, which has none of them."""

    within: _Part | None
    """The queries that see at most `top_k` tokens."""
    beyond: _Part | None


class ChosenTokens:
    """One layer's attention to the tokens that it has chosen, or an earlier layer. Each rank chooses by itself, and alike."""

    def __init__(
        self,
        spec: ModelSpec,
        layer: int,
        checkpoint: WeightSource,
        prefix: str,
        ops: Ops,
        *,
        scale: float,
        k_up: Tensor,
        v_up: Tensor,
    ) -> None:
        """`scale`, `k_up` and `v_up` are what `Ops.latent_attention` takes."""
        assert spec.mla is not None
        assert spec.mla.index is not None
        self._ops, self._top_k = ops, spec.mla.index.top_k
        self._ways = scale, k_up, v_up
        chooses = spec.mla.index.chooses[layer]
        self._index = (
            _TokenIndex(spec, spec.mla, spec.mla.index, checkpoint, prefix, ops) if chooses else None
        )

    def with_keys(self, latent: Tensor, x: Tensor, step: ForwardStep) -> Tensor:
        """(T, kv_rank + rope_dim), (T, hidden) -> latents with index keys behind them, where this layer has an index."""
        return latent if self._index is None else torch.cat((latent, self._index.keys(x, step.rotation)), -1)

    def attend(
        self, x: Tensor, query_latent: Tensor, q: Tensor, kv_layer: Latents, step: ForwardStep
    ) -> Tensor:
        """(T, hidden), (T, q_rank), (T, heads, nope_dim + rope_dim) -> (T, heads, value_dim)."""
        parts, ops = _parts_of(step.meta, self._top_k), self._ops
        if parts.beyond is None:
            return ops.latent_attention(q, kv_layer, step.meta, *self._ways)
        rows, meta = parts.beyond.rows, parts.beyond.meta or step.meta
        if self._index is not None:
            turned = Rotation(step.rotation.cos[rows], step.rotation.sin[rows], None)
            step.chosen[:] = [self._index.choose(x[rows], query_latent[rows], kv_layer, turned, meta)]
        (slots,) = step.chosen
        far = ops.selected_attention(q[rows], kv_layer, slots, meta, *self._ways)
        if parts.within is None:
            return far
        rows, meta = parts.within.rows, parts.within.meta or step.meta
        near = ops.latent_attention(q[rows], kv_layer, meta, *self._ways)
        out = near.new_empty(len(q), *near.shape[1:])
        out[rows], out[parts.beyond.rows] = near, far
        return out


class _TokenIndex:
    """The weights of a layer's index, which are whole on every rank."""

    def __init__(
        self,
        spec: ModelSpec,
        mla: MlaSpec,
        index: TokenIndexSpec,
        checkpoint: WeightSource,
        prefix: str,
        ops: Ops,
    ) -> None:
        self._ops, self._spec, self._rope_dim = ops, index, mla.rope_dim
        dim, heads = index.head_dim, index.num_heads
        order = torch.arange(dim)
        if index.interleaved:
            order[: mla.rope_dim] = torch.tensor(halves_order(0, mla.rope_dim))
        queries = checkpoint.take(f"{prefix}wq_b.weight", (heads * dim, mla.q_rank))
        self._q = ops.pack(queries.unflatten(0, (heads, dim))[:, order].flatten(0, 1), checkpoint.dtype)
        keys = checkpoint.take(f"{prefix}wk.weight", (dim, spec.hidden_size))
        self._k: LinearWeight = ops.pack(keys[order], checkpoint.dtype)
        norm, bias = (
            checkpoint.take(f"{prefix}k_norm.{name}", (dim,), torch.float32)[order]
            for name in ("weight", "bias")
        )
        self._norm = partial(_layer_norm, norm, bias)
        self._weigh = checkpoint.take(
            f"{prefix}weights_proj.weight", (heads, spec.hidden_size), torch.float32
        )

    def keys(self, x: Tensor, rotation: Rotation) -> Tensor:
        """(T, hidden) -> (T, head_dim)."""
        normed = self._ops.by_rows(self._norm, self._ops.linear(x, self._k, None))
        return self._turned(normed[:, None], rotation)[:, 0]

    def choose(
        self, x: Tensor, query_latent: Tensor, kv_layer: Latents, rotation: Rotation, meta: AttentionMeta
    ) -> Tensor:
        """(T, hidden), (T, q_rank) -> slots (T, top_k) int64. Each query sees more than `top_k` tokens."""
        index, ops = self._spec, self._ops
        q = ops.linear(query_latent, self._q, None).unflatten(-1, (index.num_heads, index.head_dim))
        weights = ops.linear(x.float(), self._weigh, None) * (index.num_heads * index.head_dim) ** -0.5
        return ops.select_tokens(self._turned(q, rotation), weights, kv_layer, meta, index.top_k)

    def _turned(self, x: Tensor, rotation: Rotation) -> Tensor:
        """(T, heads, head_dim) -> the same with its first `rope_dim` dimensions rotated."""
        dim = self._rope_dim
        rotated = self._ops.rope(x[..., :dim], rotation.cos, rotation.sin)
        return torch.cat((rotated, x[..., dim:]), -1)


def _layer_norm(weight: Tensor, bias: Tensor, x: Tensor) -> Tensor:
    return F.layer_norm(x.float(), (len(weight),), weight, bias, _EPS).to(x.dtype)


def _parts_of(meta: AttentionMeta, top_k: int) -> _Parts:
    """Return the parts, which are found once a step. A sequence may have queries in both: those of its first `top_k` tokens see
    no more, however long it is and however it is cut into chunks, so that their results do not depend on that."""
    key = ("chosen tokens", top_k)
    if (parts := meta.cache.get(key)) is None:
        near = [
            min(query, max(0, top_k - (context - query)))
            for query, context in zip(meta.query_lens, meta.context_lens, strict=True)
        ]
        far = [query - count for query, count in zip(meta.query_lens, near, strict=True)]
        contexts = [context - count for context, count in zip(meta.context_lens, far, strict=True)]
        parts = meta.cache[key] = _Parts(
            _part(meta, [0] * len(near), near, contexts), _part(meta, near, far, meta.context_lens)
        )
    return parts


def _part(
    meta: AttentionMeta, firsts: list[int], counts: list[int], contexts: list[int] | tuple[int, ...]
) -> _Part | None:
    """Return so many of each sequence's queries, from the first of `firsts` on, where there are any."""
    seqs = [seq for seq, count in enumerate(counts) if count]
    if not seqs:
        return None
    if sum(counts) == sum(meta.query_lens):
        return _Part(slice(None), None)
    starts = [meta.query_starts[seq] + firsts[seq] for seq in seqs]
    of_seqs = [torch.arange(start, start + counts[seq]) for seq, start in zip(seqs, starts, strict=True)]
    rows = torch.cat(of_seqs).to(meta.slots.device)
    part = AttentionMeta.over(
        [counts[seq] for seq in seqs],
        [contexts[seq] for seq in seqs],
        [meta.block_tables[seq] for seq in seqs],
        meta.slots[rows],
    )
    return _Part(rows, part)
