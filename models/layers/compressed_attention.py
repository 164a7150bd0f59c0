"""Attention to a window of tokens and to entries that sum up older ones (`models/layers/entries.py`).

A token's vector is key and value of all heads. What it adds to a head is turned back by the query's position, so that it depends
on their distance alone. Where queries choose, an index beside attention scores the entries that they see."""

from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.collectives import Collectives
from kernels.ops import AttentionMeta, KVLayer, Ops
from kernels.rounding import Activations, Rounding
from models.formats.weight_source import WeightSource
from models.layers.attention import ForwardStep
from models.layers.entries import Compressor, Entries, Windows, rotated, starts_of
from models.layers.rope import Rotation, halves_order
from models.layers.state_slots import StateSlots
from models.spec.compressed_spec import CompressedSpec
from models.spec.model_spec import ModelSpec

_TILE_NUMBERS = 1 << 22
"""Numbers of the largest tensor that exists for some of a sequence's queries, unless one takes more."""


class CompressedAttention:
    """Attention over as many heads as this rank has weights of. Vectors and entries are the same on every rank."""

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
        kept, hidden = spec.compressed, spec.hidden_size
        assert kept is not None
        self._ops, self._sum, self._number, self._kept = ops, collectives.sum_partial, index, kept
        self._eps, self._scale, dim = spec.norm_eps, spec.attention_scale, kept.head_dim
        order = torch.tensor(halves_order(dim - kept.rope_dim, kept.rope_dim))

        def norm(name: str, size: int) -> Tensor:
            return checkpoint.take(f"{prefix}{name}.weight", (size,), torch.float32)

        q_down = checkpoint.matrix(f"{prefix}q_a_proj.weight", (kept.q_rank, hidden))
        self._q_down, self._q_norm = ops.pack(q_down, checkpoint.dtype), norm("q_a_norm", kept.q_rank)
        q_up = checkpoint.take(f"{prefix}q_b_proj.weight", (spec.num_heads * dim, kept.q_rank))
        self._q_up = ops.pack(q_up.unflatten(0, (-1, dim))[:, order].flatten(0, 1), checkpoint.dtype)
        self._ones = torch.ones(dim, device=checkpoint.device)
        kv = checkpoint.take(f"{prefix}kv_proj.weight", (dim, hidden))
        self._kv, self._kv_norm = ops.pack(kv[order], checkpoint.dtype), norm("kv_norm", dim)[order]
        self._sinks = checkpoint.take(f"{prefix}sinks", (spec.num_heads,), torch.float32)
        in_group = spec.num_heads * dim // kept.out_groups
        first = checkpoint.take(f"{prefix}o_a_proj.weight", (kept.out_groups * kept.out_rank, in_group))
        turned = first.unflatten(1, (-1, dim))[:, :, order].flatten(1)
        self._groups = turned.unflatten(0, (-1, kept.out_rank)).mT.contiguous()
        """(groups here, heads of a group * head_dim, out_rank)"""
        out = checkpoint.matrix(f"{prefix}o_b_proj.weight", (hidden, kept.out_groups * kept.out_rank))
        self._out = ops.pack(out, checkpoint.dtype)
        self._compressor = self._slots = self._index = None
        if kept.rates[index]:
            compressor = f"{prefix}compressor."
            self._compressor = Compressor(spec, kept, index, checkpoint, compressor, ops)
            self._slots = StateSlots(kept.state_rows(index), kept.entry_size(index))
        if kept.chooses[index]:
            self._index = _EntryIndex(spec, kept, checkpoint, f"{prefix}compressor.indexer.", ops)

    def __call__(self, x: Activations, kv_layer: KVLayer, step: ForwardStep) -> Tensor:
        assert isinstance(x, Tensor), "what takes it is floats"
        assert isinstance(kv_layer, Tensor), "states are kept as they are"
        ops, rotation, dim = self._ops, step.rotation, self._kept.head_dim
        own = ops.rms_norm(ops.linear(x, self._kv, None), self._kv_norm, self._eps)
        own = rotated(ops, own[:, None], rotation.cos, rotation.sin)[:, 0]
        entries = self._entries(x, kv_layer, step.meta)
        if entries is not None:
            own = torch.cat((own, entries.pieces(self._kept.room)), 1)
        vectors = kv_layer.flatten(0, 3)
        vectors[:, : own.shape[1]].index_copy_(0, step.meta.slots, own)
        if step.on_layer is not None:
            step.on_layer(self._number)
        latent = ops.rms_norm(ops.linear(x, self._q_down, None), self._q_norm, self._eps)
        q = ops.linear(latent, self._q_up, None).unflatten(1, (-1, dim))
        q = rotated(ops, ops.rms_norm(q, self._ones, self._eps), rotation.cos, rotation.sin)
        index = None if self._index is None else self._index.asked(x, latent, rotation)
        out = torch.empty_like(q)
        for seq, (start, count) in enumerate(zip(starts_of(step.meta), step.meta.query_lens, strict=True)):
            rows = slice(step.meta.query_starts[seq], step.meta.query_starts[seq] + count)
            seen = self._seen(kv_layer, entries, step.meta, seq)
            asked = None if index is None else _Asked(index.q[rows], index.weights[rows])
            out[rows] = self._attended(q[rows], start, seen, asked)
        return self._projected(rotated(ops, out, rotation.cos, -rotation.sin))

    def _entries(self, x: Tensor, kv_layer: Tensor, meta: AttentionMeta) -> Entries | None:
        """Make the step's entries, and write the states behind its known tokens."""
        if self._compressor is None or self._slots is None:
            return None
        assert meta.states is not None
        compressor, slots, states = self._compressor, self._slots, meta.states
        rows, windows = compressor.rows(x), Windows.of_step(meta, compressor.rate)
        held = compressor.begun(slots.read(kv_layer, states.blocks), states.begins)
        made, behind = compressor.entries(rows, held, windows)
        if not states.num_drafts:
            slots.write(kv_layer, states.blocks, behind)
            return Entries(made, held, windows)
        starts = starts_of(meta)
        known = [count - drafts for count, drafts in zip(meta.query_lens, states.num_drafts, strict=True)]
        split = _drafts_of(meta)
        _, behind = compressor.entries(
            rows[split.known], held, Windows.of(starts, known, compressor.rate, x.device)
        )
        slots.write(kv_layer, states.blocks, behind)
        drafts, positions = rows[split.drafts], split.positions

        def take_in(right: AttentionMeta, taken: Tensor) -> None:
            assert right.states is not None
            firsts = [positions[row] for row in taken[list(right.query_starts[:-1])].tolist()]
            before = slots.read(kv_layer, right.states.blocks)
            own = Windows.of(firsts, right.query_lens, compressor.rate, x.device)
            slots.write(kv_layer, right.states.blocks, compressor.entries(drafts[taken], before, own)[1])

        states.kept.append(take_in)
        return Entries(made, held, windows)

    def _seen(self, kv_layer: Tensor, entries: Entries | None, meta: AttentionMeta, seq: int) -> "_Seen":
        """Return what a sequence's queries may attend to."""
        dim, size, vectors = self._kept.head_dim, self._kept.room, kv_layer.flatten(0, 3)
        slots = _slots_of(meta, seq, kv_layer.shape[3])
        first = max(0, len(slots) - meta.query_lens[seq] - self._kept.window + 1)
        near = vectors[slots[first:], :dim]
        if entries is None or self._compressor is None:
            return _Seen(near, first, None)
        rate, before = self._compressor.rate, entries.windows.num_before[seq]
        made = entries.made[entries.windows.complete[seq]]
        if before:
            # With the tokens of the window behind it each of these is stored but for the last.
            stored = slots[rate : before * rate].view(before - 1, rate)[:, : -(-made.shape[1] // size)]
            pieces = vectors[stored, dim:].flatten(1)
            made = torch.cat((pieces[:, : made.shape[1]], entries.before(seq), made))
        return _Seen(near, first, made)

    def _attended(self, q: Tensor, start: int, seen: "_Seen", index: "_Asked | None") -> Tensor:
        """(t, H, D) queries from position `start` on -> (t, H, D)."""
        num_far, heads = 0 if seen.entries is None else len(seen.entries), q.shape[1]
        chosen = 0 if index is None else min(num_far, self._kept.index.top_k) * q.shape[2]
        most = max(
            heads * (len(seen.near) + num_far), chosen, 0 if index is None else index.q.shape[1] * num_far
        )
        size = max(1, _TILE_NUMBERS // most)
        parts = [
            self._tile(q, slice(at, min(at + size, len(q))), start, seen, index)
            for at in range(0, len(q), size)
        ]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _tile(self, q: Tensor, rows: slice, start: int, seen: "_Seen", index: "_Asked | None") -> Tensor:
        q = q[rows]
        at = torch.arange(start + rows.start, start + rows.stop, device=q.device)[:, None]
        token = torch.arange(seen.first, seen.first + len(seen.near), device=q.device)
        hidden = (token > at) | (token <= at - self._kept.window)
        scores = [torch.einsum("thd,nd->thn", q, seen.near).masked_fill(hidden[:, None], -torch.inf)]
        far = None
        if seen.entries is not None and self._compressor is not None and len(seen.entries):
            number = torch.arange(len(seen.entries), device=q.device)
            later = number >= (at + 1) // self._compressor.rate
            far, later = _chosen(seen.entries, later, index, rows, self._kept)
            names = "thd,tnd->thn" if far.ndim == 3 else "thd,nd->thn"
            scores.append(torch.einsum(names, q, far).masked_fill(later[:, None], -torch.inf))
        sinks = self._sinks.expand(len(q), -1)[..., None]
        weights = torch.cat((*(each.float() * self._scale for each in scores), sinks), -1).softmax(-1)
        weights = weights.to(q.dtype)
        out = torch.einsum("thn,nd->thd", weights[..., : len(token)], seen.near)
        if far is None:
            return out
        names = "thn,tnd->thd" if far.ndim == 3 else "thn,nd->thd"
        return out + torch.einsum(names, weights[..., len(token) : -1], far)

    def _projected(self, attended: Tensor) -> Tensor:
        """(T, heads, D) -> (T, hidden): by groups of heads, then mixed."""
        grouped = attended.flatten(1).unflatten(1, (len(self._groups), -1)).transpose(0, 1)
        mixed = torch.bmm(grouped, self._groups).transpose(0, 1).flatten(1)
        return self._sum(self._ops.linear(mixed, self._out, None))


@dataclass(frozen=True, slots=True)
class _Seen:
    near: Tensor
    """(n, D): vectors of tokens, up to the last one."""
    first: int
    """The position of the first of these."""
    entries: Tensor | None
    """(e, E): all that are complete."""


@dataclass(frozen=True, slots=True)
class _Asked:
    """What an index scores entries with."""

    q: Tensor
    """(T, J, I)"""
    weights: Tensor
    """(T, J) float32"""


class _EntryIndex:
    """The weights of a layer's index, which are whole on every rank."""

    def __init__(
        self, spec: ModelSpec, kept: CompressedSpec, checkpoint: WeightSource, prefix: str, ops: Ops
    ) -> None:
        heads, dim = kept.index.num_heads, kept.index.head_dim
        self._ops, self._heads, self._dim = ops, heads, dim
        order = halves_order(dim - kept.rope_dim, kept.rope_dim)
        queries = checkpoint.take(f"{prefix}q_b_proj.weight", (heads * dim, kept.q_rank))
        self._q = ops.pack(queries.unflatten(0, (heads, dim))[:, order].flatten(0, 1), checkpoint.dtype)
        weigh = checkpoint.take(f"{prefix}scorer.weights_proj.weight", (heads, spec.hidden_size))
        self._weigh = ops.pack(weigh, checkpoint.dtype)

    def asked(self, x: Tensor, latent: Tensor, rotation: Rotation) -> _Asked:
        q = self._ops.linear(latent, self._q, None).unflatten(1, (self._heads, self._dim))
        weights = self._ops.linear(x, self._weigh, None).float() * (self._heads * self._dim) ** -0.5
        return _Asked(rotated(self._ops, q, rotation.cos, rotation.sin), weights)


def _chosen(
    entries: Tensor, later: Tensor, index: _Asked | None, rows: slice, kept: CompressedSpec
) -> tuple[Tensor, Tensor]:
    """Return what queries attend to, (e, D) or (t, k, D), and what of it they do not see, (t, e) or (t, k)."""
    own, top_k = entries[:, : kept.head_dim], kept.index.top_k
    if index is None or len(entries) <= top_k:
        return own, later
    keys = entries[:, kept.head_dim :].float()
    products = (index.q[rows].float() @ keys.T).relu_() * index.weights[rows][..., None]
    found = products.sum(1).masked_fill_(later, -torch.inf).topk(top_k, -1)
    return own[found.indices], found.values == -torch.inf


@dataclass(frozen=True, slots=True)
class _Drafts:
    known: Tensor
    drafts: Tensor
    """(N,) int64 rows of a step."""
    positions: tuple[int, ...]
    """The draft tokens' positions."""


def _drafts_of(meta: AttentionMeta) -> _Drafts:
    if (found := meta.cache.get("compressed drafts")) is None:
        assert meta.states is not None
        known, drafts, positions = list[int](), list[int](), list[int]()
        for seq, count in enumerate(meta.states.num_drafts):
            first, end = meta.query_starts[seq : seq + 2]
            known += range(first, end - count)
            drafts += range(end - count, end)
            positions += range(meta.context_lens[seq] - count, meta.context_lens[seq])
        device = meta.slots.device
        found = meta.cache["compressed drafts"] = _Drafts(
            torch.tensor(known, device=device), torch.tensor(drafts, device=device), tuple(positions)
        )
    return found


def _slots_of(meta: AttentionMeta, seq: int, block_size: int) -> Tensor:
    """(context,) int64: where a sequence's tokens lie, found once a step."""
    if (found := meta.cache.get(key := ("slots", seq))) is None:
        each = meta.block_tables[seq][:, None] * block_size + torch.arange(block_size)
        found = meta.cache[key] = each.flatten()[: meta.context_lens[seq]].to(meta.slots.device)
    return found
