"""Attention over a paged KV cache in pure PyTorch.

The blocks that a sequence may see are gathered into scratch memory and attended there. Sequences with one query token are taken
together, in groups of similar context; the others one by one, in tiles of query tokens. Nothing that was not written for a
sequence can reach its result, not even a NaN that an earlier owner of a block left."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence

from kernels.kv_parts import KVPart, whole_vectors
from kernels.ops import AttentionMeta, KVLayer
from kernels.torch.scaled_kv import as_floats

_GROUP_BYTES = 2 << 20
"""The bytes of gathered K and V of a group: few enough to stay in a core's caches from the copy to the attention (1 to 4 MiB do
best)."""
_TILE_TOKENS = 128
_ALIGNED = 16
"""Elements: masks begin at a multiple of it, since kernels of GPUs read 16 bytes of them at once, and check strides alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Gather:
    """Which blocks of which sequences are copied to scratch, and what of them may be seen."""

    rows: slice
    """Rows of the single queries in the plan's order, or of the packed tokens."""
    shape: tuple[int, int, int, int]
    """(2, sequences, heads of the layer, padded context in tokens): K and V."""
    block_rows: Tensor
    """Rows of the layer seen as (num_blocks * 2 * Hkv, block_size * D), for K and V."""
    stale_rows: Tensor | None
    """Rows of the gathered tokens seen as (-1, D) that belong to no token of the sequence."""
    mask: Tensor | None
    """The single queries' mask (sequences, 1, 1, padded context), added to the scores."""
    context_tokens: int
    """Gathered tokens that exist, for a sequence with many queries."""
    sees_all: bool
    """Whether its queries see all of them."""


@dataclass(frozen=True, slots=True)
class _Plan:
    """A step's gathers under one window, the same in all layers."""

    single_rows: Tensor
    """Rows of the packed tokens that are their sequences' only ones, in the order of `singles`."""
    singles: tuple[_Gather, ...]
    many: tuple[_Gather, ...]


class PagedAttention:
    """`Ops.paged_attention`. It owns scratch memory, which is kept because new pages for every layer cost more than the
    attention. An object serves one thread."""

    def __init__(self) -> None:
        self._scratch: Tensor | None = None
        self._causal: dict[tuple[int, torch.dtype], Tensor] = {}

    def __call__(
        self, q: Tensor, stored: KVLayer, meta: AttentionMeta, scale: float, window: int, soft_cap: float,
        sinks: Tensor | None,
    ) -> Tensor:  # fmt: skip
        part = stored if isinstance(stored, KVPart) else None
        if isinstance(stored, KVPart):
            kv_layer = stored.data
        else:
            kv_layer, meta = as_floats(stored, meta, q.dtype)
        key = "attention", window, kv_layer.shape[2], None if part is None else part.places
        if (plan := meta.cache.get(key)) is None:
            heads = torch.arange(kv_layer.shape[2]) if part is None else part.heads
            plan = meta.cache[key] = _make_plan(meta, kv_layer, heads, window, q.dtype)
        width = 1 if part is None else part.places.width
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        if plan.singles:
            queries = q.index_select(0, plan.single_rows)
            attended = torch.empty_like(queries)
            for gather in plan.singles:
                keys, values = self._gather(kv_layer, gather, width)
                attended[gather.rows] = _attend_single(
                    queries[gather.rows], keys, values, gather.mask, scale, soft_cap, sinks
                )
            out.index_copy_(0, plan.single_rows, attended)
        for gather in plan.many:
            keys, values = self._gather(kv_layer, gather, width)
            self._attend_many(q[gather.rows], keys[0], values[0], gather, window, scale, soft_cap, sinks, out)
        return out

    def _gather(self, kv_layer: Tensor, gather: _Gather, width: int) -> tuple[Tensor, Tensor]:
        """K and V, each (sequences, Hkv, padded context, D). A head is `width` neighbouring ones of those that are gathered."""
        num_blocks, _, num_heads, block_size, head_dim = kv_layer.shape
        flat = kv_layer.view(num_blocks * 2 * num_heads, block_size * head_dim)
        shape = (gather.block_rows.shape[0], block_size * head_dim)
        size = shape[0] * shape[1]
        if self._scratch is None or self._scratch.numel() < size or self._scratch.dtype != kv_layer.dtype:
            self._scratch = torch.empty(size, dtype=kv_layer.dtype, device=kv_layer.device)
        room = self._scratch[:size].view(shape)
        torch.index_select(flat, 0, gather.block_rows, out=room)
        if gather.stale_rows is not None:
            room.view(-1, head_dim).index_fill_(0, gather.stale_rows, 0.0)
        found = room.view(*gather.shape, head_dim)
        keys, values = (whole_vectors(found.unflatten(2, (-1, width))) if width > 1 else found).unbind(0)
        return keys, values

    def _attend_many(
        self, q: Tensor, k: Tensor, v: Tensor, gather: _Gather, window: int, scale: float, soft_cap: float,
        sinks: Tensor | None, out: Tensor,
    ) -> None:  # fmt: skip
        """(T, H, D) x (Hkv, L, D) -> out[gather.rows]. A tile sees no key before its first query's window, nor behind its last
        query, unless all are seen."""
        num_tokens, num_heads, head_dim = q.shape
        num_kv_heads, repeats = k.shape[0], num_heads // k.shape[0]
        queries = q.view(num_tokens, num_kv_heads, repeats, head_dim).permute(1, 2, 0, 3)
        keys, values = (x[:, None].expand(-1, repeats, -1, -1) for x in (k, v))
        for start in range(0, num_tokens, _TILE_TOKENS):
            stop = min(start + _TILE_TOKENS, num_tokens)
            position = gather.context_tokens - num_tokens + start
            end = gather.context_tokens if gather.sees_all else position + stop - start
            first = max(0, position - window + 1) if window else 0
            if gather.sees_all:
                mask = _window_mask(position - first, stop - start, end - first, window, q)
            else:
                mask = self._tile_mask(stop - start, end - first, window, q)
            attended = _attend(
                queries[:, :, start:stop],
                keys[:, :, first:end],
                values[:, :, first:end],
                mask,
                scale,
                soft_cap,
                None if sinks is None else sinks.view(num_kv_heads, repeats, 1, 1),
            )
            rows = slice(gather.rows.start + start, gather.rows.start + stop)
            out[rows] = attended.permute(2, 0, 1, 3).reshape(stop - start, num_heads, head_dim)

    def _tile_mask(self, num_queries: int, num_keys: int, window: int, like: Tensor) -> Tensor:
        """(num_queries, num_keys), added to the scores; the last query is the last key's token.

        It depends on distances from the last token alone: all are parts of one matrix, and begin in a column that is aligned."""
        whole = self._causal.get((window, like.dtype))
        if whole is None or whole.shape[1] < num_keys:
            size = 1 << (max(num_keys, 2 * _TILE_TOKENS) - 1).bit_length()
            key = torch.arange(size, device=like.device)
            last = torch.arange(size - _TILE_TOKENS - _ALIGNED, size, device=like.device)[:, None]
            hidden = (key > last) | (key <= last - window) if window else key > last
            whole = torch.zeros(hidden.shape, dtype=like.dtype, device=like.device)
            self._causal[window, like.dtype] = whole.masked_fill_(hidden, -torch.inf)
        spare = (whole.shape[1] - num_keys) % _ALIGNED
        end_row, end_column = whole.shape[0] - spare, whole.shape[1] - spare
        return whole[end_row - num_queries : end_row, end_column - num_keys : end_column]


def _window_mask(position: int, num_queries: int, num_keys: int, window: int, like: Tensor) -> Tensor | None:
    """(num_queries, num_keys), added to the scores: what a window hides. `position`: the first query's among the keys."""
    if not window:
        return None
    key = torch.arange(num_keys, device=like.device)
    query = torch.arange(position, position + num_queries, device=like.device)[:, None]
    mask = torch.zeros((num_queries, num_keys), dtype=like.dtype, device=like.device)
    return mask.masked_fill_(key <= query - window, -torch.inf)


def _attend_single(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float, soft_cap: float, sinks: Tensor | None
) -> Tensor:
    """Attend (b, H, D) x (b, Hkv, L, D). The query heads of one KV head take the place of query tokens."""
    num_seqs, num_heads, head_dim = q.shape
    num_kv_heads, repeats = k.shape[1], num_heads // k.shape[1]
    grouped = q.view(num_seqs, num_kv_heads, repeats, head_dim)
    per_head = None if sinks is None else sinks.view(num_kv_heads, repeats, 1)
    return _attend(grouped, k, v, mask, scale, soft_cap, per_head).reshape(num_seqs, num_heads, head_dim)


def _attend(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float, soft_cap: float, sinks: Tensor | None
) -> Tensor:
    if not soft_cap and sinks is None:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale)
    scores = (q @ k.transpose(-1, -2)).float() * scale
    if soft_cap:
        scores = torch.tanh(scores / soft_cap) * soft_cap
    if mask is not None:
        scores += mask
    if sinks is None:
        return torch.softmax(scores, -1).to(v.dtype) @ v
    with_sinks = torch.cat((scores, sinks.expand(*scores.shape[:-1], 1)), -1)
    return torch.softmax(with_sinks, -1)[..., :-1].to(v.dtype) @ v


def _make_plan(
    meta: AttentionMeta, kv_layer: Tensor, heads: Tensor, window: int, dtype: torch.dtype
) -> _Plan:
    """`heads`: those of the layer that are gathered."""
    block_size = kv_layer.shape[3]
    spans = [
        _visible_blocks(query, context, window, block_size)
        for query, context in zip(meta.query_lens, meta.context_lens, strict=True)
    ]
    single = [i for i, query_len in enumerate(meta.query_lens) if query_len == 1]
    single.sort(key=lambda i: spans[i][1] - spans[i][0])
    singles: list[_Gather] = []
    at = 0
    for members in _groups(single, spans, kv_layer[0].nbytes):
        rows = slice(at, at + len(members))
        singles.append(_make_gather(meta, kv_layer, heads, members, spans, rows, window, dtype))
        at += len(members)
    many = tuple(
        _make_gather(meta, kv_layer, heads, [i], spans, slice(*meta.query_starts[i : i + 2]), window, None)
        for i, query_len in enumerate(meta.query_lens)
        if query_len > 1
    )
    single_rows = torch.tensor([meta.query_starts[i] for i in single], dtype=torch.int64)
    return _Plan(single_rows.to(kv_layer.device), tuple(singles), many)


def _visible_blocks(query_len: int, context_len: int, window: int, block_size: int) -> tuple[int, int]:
    """Return the first block that the first query sees, and the end of the context's blocks."""
    first = max(0, context_len - query_len - window + 1) // block_size if window else 0
    return first, -(-context_len // block_size)


def _groups(
    ordered: Sequence[int], spans: Sequence[tuple[int, int]], block_bytes: int
) -> Iterator[list[int]]:
    """Yield groups of sequences with similar context, as many as fit into _GROUP_BYTES when padded to the longest."""
    group: list[int] = []
    for i in ordered:
        longest = spans[i][1] - spans[i][0]
        if group and (len(group) + 1) * longest * block_bytes > _GROUP_BYTES:
            yield group
            group = []
        group.append(i)
    if group:
        yield group


def _make_gather(
    meta: AttentionMeta,
    kv_layer: Tensor,
    heads: Tensor,
    members: Sequence[int],
    spans: Sequence[tuple[int, int]],
    rows: slice,
    window: int,
    mask_dtype: torch.dtype | None,
) -> _Gather:
    num_heads, block_size = kv_layer.shape[2:4]
    num_taken, device = len(heads), kv_layer.device
    tables = pad_sequence([meta.block_tables[i][slice(*spans[i])] for i in members], batch_first=True)
    key_rows = (tables[:, None, :] * (2 * num_heads) + heads[None, :, None]).flatten()
    num_tokens = tables.shape[1] * block_size
    lens = np.array([meta.context_lens[i] - spans[i][0] * block_size for i in members])[:, None]
    position = np.arange(num_tokens)
    stale = position >= lens
    return _Gather(
        rows=rows,
        shape=(2, len(members), num_taken, num_tokens),
        block_rows=torch.cat((key_rows, key_rows + num_heads)).to(device),
        stale_rows=_stale_rows(stale, num_taken, device),
        mask=None
        if mask_dtype is None
        else _additive(stale | (position < lens - window) if window else stale, mask_dtype, device),
        context_tokens=int(lens[0, 0]),
        sees_all=meta.sees_all(members[0]),
    )


def _stale_rows(stale: np.ndarray, num_heads: int, device: torch.device) -> Tensor | None:
    """`stale` (sequences, tokens) -> rows of (2, sequences, heads, tokens), flattened."""
    seq, token = np.nonzero(stale)
    if not len(seq):
        return None
    num_seqs, num_tokens = stale.shape
    per_head = seq * (num_heads * num_tokens) + token
    head = np.arange(num_heads)[:, None] * num_tokens
    keys = (head + per_head).ravel()
    rows = np.concatenate((keys, keys + num_seqs * num_heads * num_tokens))
    return torch.from_numpy(rows).to(device)


def _additive(hidden: np.ndarray, dtype: torch.dtype, device: torch.device) -> Tensor | None:
    if not hidden.any():
        return None
    mask = np.where(hidden, np.float32(-np.inf), np.float32(0.0))[:, None, None]
    return torch.from_numpy(mask).to(device, dtype)
