"""Attention over a paged KV cache whose bits for a token depend on that token's position and its sequence's KV alone.

A context is taken in spans that begin at multiples of their length, one after the other (an online softmax: Milakov and
Gimelshein, 2018). Every product and sum has one of few shapes, and a span that a token does not see changes no bit for it."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from kernels.kv_parts import KVPart
from kernels.ops import AttentionMeta, KVLayer, Latents
from kernels.torch.row_tiles import RowTiles
from kernels.torch.scaled_kv import as_floats
from kernels.torch.stored_latents import blocks_of

_SPAN_TOKENS = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class _Attend:
    """One sequence's queries against its KV, all in float32."""

    spans: Sequence[tuple[int, Tensor, Tensor]]
    """First token, K (Hkv, 256, D), V (Hkv, 256, V)."""
    scale: float
    window: int
    soft_cap: float
    sinks: Tensor | None

    def __call__(self, q: Tensor, positions: Tensor, ahead: Tensor) -> Sequence[Tensor]:
        """(h, H, D), (h,), (h,): how many of the tokens behind it a query sees -> (h, H, V)."""
        num_tokens, num_heads, size = q.shape
        kv_heads, _, value_size = self.spans[0][2].shape
        repeats = num_heads // kv_heads
        grouped = q.view(num_tokens, kv_heads, repeats, size).transpose(0, 1).flatten(1, 2)
        at, further = (each.repeat_interleave(repeats)[:, None] for each in (positions, ahead))
        acc = grouped.new_zeros((*grouped.shape[:2], value_size))
        largest = grouped.new_full((*grouped.shape[:2], 1), -torch.inf)
        total = torch.zeros_like(largest)
        for first, k, v in self.spans:
            weights, factor, largest = self._weigh(grouped @ k.mT, at, at + further, first, largest)
            total = total * factor + weights.sum(-1, keepdim=True)
            acc = acc * factor + weights @ v
        if self.sinks is not None:
            sink = self.sinks.view(kv_heads, 1, repeats).expand(-1, num_tokens, -1).reshape(largest.shape)
            now = torch.maximum(largest, sink)
            factor = torch.exp(largest - now)
            acc, total = acc * factor, total * factor + torch.exp(sink - now)
        out = (acc / total).view(kv_heads, num_tokens, repeats, value_size).transpose(0, 1)
        return (out.reshape(num_tokens, num_heads, value_size),)

    def _weigh(
        self, products: Tensor, at: Tensor, last: Tensor, first: int, largest: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """(Hkv, rows, 256), positions and the last that are seen (rows, 1), (Hkv, rows, 1) -> weights and the factor of what is
        accumulated, both relative to the new largest score; that score. A row that has seen nothing yet keeps weights of zero."""
        scores = products * self.scale
        if self.soft_cap:
            scores = torch.tanh(scores / self.soft_cap) * self.soft_cap
        token = torch.arange(first, first + products.shape[2])
        hidden = (token > last) | (token <= at - self.window) if self.window else token > last
        scores = scores.masked_fill(hidden, -torch.inf)
        now = torch.maximum(largest, scores.amax(-1, keepdim=True))
        base = now.masked_fill(now == -torch.inf, 0.0)
        return torch.exp(scores - base), torch.exp(largest - base), now


class InvariantAttention:
    """`Ops.paged_attention`, on a CPU."""

    def __init__(self, tiles: RowTiles) -> None:
        self._tiles = tiles

    def __call__(
        self, q: Tensor, stored: KVLayer, meta: AttentionMeta, scale: float, window: int, soft_cap: float,
        sinks: Tensor | None,
    ) -> Tensor:  # fmt: skip
        kv_layer, meta = (stored, meta) if isinstance(stored, KVPart) else as_floats(stored, meta, q.dtype)
        out = torch.empty_like(q)
        for seq in range(len(meta.query_lens)):
            spans = [(first, kv[0], kv[1]) for first, kv in spans_of(kv_layer, meta, seq, window)]
            attend_to(
                self._tiles,
                _Attend(spans=spans, scale=scale, window=window, soft_cap=soft_cap, sinks=sinks),
                q,
                meta,
                seq,
                out,
            )
        return out


class InvariantLatentAttention:
    """`Ops.latent_attention`, on a CPU: absorbed for all (kernels.latent)."""

    def __init__(self, tiles: RowTiles) -> None:
        self._tiles = tiles

    def __call__(
        self, q: Tensor, kv_layer: Latents, meta: AttentionMeta, scale: float, k_up: Tensor, v_up: Tensor
    ) -> Tensor:
        k_up, v_up, wide = k_up.float(), v_up.float(), q.float()
        nope, rank = k_up.shape[1:]
        in_latents = self._tiles.one(
            ("to latents", k_up.shape), lambda x: torch.einsum("thn,hnr->thr", x, k_up), wide[..., :nope]
        )
        queries = torch.cat((in_latents, wide[..., nope:]), -1)
        out = queries.new_empty((*queries.shape[:2], rank))
        for seq in range(len(meta.query_lens)):
            latents = spans_of(kv_layer, meta, seq, 0, slice(queries.shape[2]))
            spans = [(first, kv[0], kv[0, ..., :rank]) for first, kv in latents]
            attend_to(
                self._tiles,
                _Attend(spans=spans, scale=scale, window=0, soft_cap=0.0, sinks=None),
                queries,
                meta,
                seq,
                out,
            )
        values = self._tiles.one(
            ("from latents", v_up.shape), lambda x: torch.einsum("thr,hvr->thv", x, v_up), out
        )
        return values.to(q.dtype)


def attend_to(
    tiles: RowTiles, attend: _Attend, q: Tensor, meta: AttentionMeta, seq: int, out: Tensor
) -> None:
    """Fills the rows of `out` (T, H, V) that are the sequence's."""
    rows = slice(*meta.query_starts[seq : seq + 2])
    context = meta.context_lens[seq]
    positions = torch.arange(context - meta.query_lens[seq], context)
    ahead = context - 1 - positions if meta.sees_all(seq) else torch.zeros_like(positions)
    _, k, v = attend.spans[0]
    key = ("attention", k.shape, v.shape, attend.window, attend.soft_cap > 0, attend.sinks is None)
    out[rows] = tiles.run(key, attend, q[rows].float(), positions, ahead, trial=lambda: _trial(attend))[0]


def _trial(attend: _Attend) -> _Attend:
    """Attend to one span of random KV instead. A real one may be so short that every way of adding up agrees."""
    generator = torch.Generator().manual_seed(1)
    _, k, v = attend.spans[0]
    k, v = (torch.randn(x.shape, generator=generator) for x in (k, v))
    return _Attend(
        spans=[(0, k, v)],
        scale=attend.scale,
        window=attend.window,
        soft_cap=attend.soft_cap,
        sinks=attend.sinks,
    )


def spans_of(
    kv_layer: Latents | KVPart, meta: AttentionMeta, seq: int, window: int, part: slice = slice(None)
) -> list[tuple[int, Tensor]]:
    """Yield the first token and (planes, Hkv, 256, D) float32 of each span that any of the sequence's queries sees; of latents,
    a `part` of D. It is zero where there is no token, whatever an earlier owner of the block has left there."""
    context, block_size = meta.context_lens[seq], kv_layer.shape[3]
    earliest = max(0, context - meta.query_lens[seq] - window + 1) if window else 0
    spans: list[tuple[int, Tensor]] = []
    for first in range(earliest // _SPAN_TOKENS * _SPAN_TOKENS, context, _SPAN_TOKENS):
        end = min(first + _SPAN_TOKENS, context)
        start_block = first // block_size
        ids = meta.block_tables[seq][start_block : -(-end // block_size)]
        blocks = kv_layer.blocks(ids) if isinstance(kv_layer, KVPart) else blocks_of(kv_layer, ids, part)
        vectors = blocks.permute(1, 2, 0, 3, 4).flatten(2, 3)[:, :, first - start_block * block_size :]
        there = vectors[:, :, : end - first].float()
        spans.append((first, F.pad(there, (0, 0, 0, _SPAN_TOKENS - there.shape[2])).contiguous()))
    return spans
