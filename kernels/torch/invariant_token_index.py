"""The choice of tokens, and attention to them, whose bits for a query depend on its sequence alone, on a CPU.

Scores come from products of few shapes, as in `kernels.torch.invariant_attention`. Attention to chosen tokens is over as many for
every query, and is computed for one query at a time."""

import torch
from torch import Tensor

from kernels.ops import AttentionMeta, Latents
from kernels.torch.invariant_attention import spans_of
from kernels.torch.row_tiles import RowTiles, Rowwise
from kernels.torch.stored_latents import tokens_of
from kernels.torch.token_index import attend_to, hide_later, highest, index_scores, slots_of

_ROWS = 64
"""The most queries whose scores exist at one time."""


class InvariantTokenIndex:
    """Both operations."""

    def __init__(self, tiles: RowTiles) -> None:
        self._tiles = tiles

    def select_tokens(
        self, q: Tensor, weights: Tensor, kv_layer: Latents, meta: AttentionMeta, top_k: int
    ) -> Tensor:
        """`Ops.select_tokens`."""
        size = q.shape[2]
        found = torch.empty((len(q), top_k), dtype=torch.int64)
        for seq, context in enumerate(meta.context_lens):
            spans = [keys[0, 0] for _, keys in spans_of(kv_layer, meta, seq, 0, slice(-size, None))]
            slots = slots_of(meta.block_tables[seq], kv_layer.shape[3])
            first, end = meta.query_starts[seq : seq + 2]
            for start in range(first, end, _ROWS):
                rows = slice(start, min(start + _ROWS, end))
                seen = context - (end - rows.stop)
                scores = self._scores(q[rows].float(), weights[rows], spans)[:, :seen]
                found[rows] = slots[highest(hide_later(scores), top_k)]
        return found

    def _scores(self, q: Tensor, weights: Tensor, spans: list[Tensor]) -> Tensor:
        """(t, J, I), (t, J), spans of keys (256, I) each -> (t, all tokens of them)."""
        key = ("index scores", spans[0].shape)
        parts = [
            self._tiles.run(key, _scoring(keys), q, weights, trial=lambda: _scoring(_random(spans[0])))[0]
            for keys in spans
        ]
        return torch.cat(parts, 1)

    def selected_attention(
        self, q: Tensor, kv_layer: Latents, slots: Tensor, meta: AttentionMeta, scale: float, k_up: Tensor,
        v_up: Tensor,
    ) -> Tensor:  # fmt: skip
        """`Ops.selected_attention`."""
        del meta  # the slots say all
        k_up, v_up, wide = k_up.float(), v_up.float(), q.float()
        nope, rank = k_up.shape[1:]
        in_latents = self._tiles.one(
            ("to latents", k_up.shape), lambda x: torch.einsum("thn,hnr->thr", x, k_up), wide[..., :nope]
        )
        queries = torch.cat((in_latents, wide[..., nope:]), -1)
        attended = queries.new_empty((*queries.shape[:2], rank))
        for row, at in enumerate(slots):
            latents = tokens_of(kv_layer, at, queries.shape[2]).float()
            attended[row] = attend_to(queries[row].clone()[None], latents[None], scale, rank)[0]
        values = self._tiles.one(
            ("from latents", v_up.shape), lambda x: torch.einsum("thr,hvr->thv", x, v_up), attended
        )
        return values.to(q.dtype)


def _scoring(keys: Tensor) -> Rowwise:
    return lambda q, weights: (index_scores(q, weights, keys),)


def _random(like: Tensor) -> Tensor:
    """A real span may be so short that every way of adding up agrees."""
    return torch.randn(like.shape, generator=torch.Generator().manual_seed(1))
