"""Multi-head latent attention (arXiv:2405.04434, section 2.1) in pure PyTorch, over a paged cache of latents.

A token's cache entry is its latent (rank R), from which every head's key and value can be made, followed by the one rotated key
(P) that all heads share. Scores can be taken in two ways that differ in rounding only: *absorbed*, where the queries
are brought into the latent space, and *expanded*, where keys and values are made from the latents."""

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn import functional as F

from kernels.ops import AttentionMeta, Latents
from kernels.torch.stored_latents import blocks_of

_TILE_TOKENS = 64
_EXPANDED_HEADS = 16
"""The number of heads whose keys and values exist at one time."""


def latent_attention(
    q: Tensor, kv_layer: Latents, meta: AttentionMeta, scale: float, k_up: Tensor, v_up: Tensor
) -> Tensor:
    """Attend. Each sequence takes the way that needs fewer multiplications."""
    out = q.new_empty(len(q), q.shape[1], v_up.shape[1])
    latent = slice(k_up.shape[2] + q.shape[2] - k_up.shape[1])
    for i, (query_len, context_len) in enumerate(zip(meta.query_lens, meta.context_lens, strict=True)):
        rows = slice(meta.query_starts[i], meta.query_starts[i + 1])
        blocks = blocks_of(kv_layer, meta.block_tables[i].to(q.device), latent)
        latents = blocks.flatten(0, 3)[:context_len].to(q.dtype)
        attend = _expanded if expanding_pays(query_len, q.shape[-1], k_up, v_up) else _absorbed
        out[rows] = attend(q[rows], latents, scale, k_up, v_up)
    return out


def expanding_pays(query_len: int, query_dim: int, k_up: Tensor, v_up: Tensor) -> bool:
    """Return whether expanding takes fewer multiplications for each head and token of context. Expanding costs some once;
    absorbing costs more for every query."""
    nope, rank, value = k_up.shape[1], k_up.shape[2], v_up.shape[1]
    absorbed = query_len * (query_dim - nope + 2 * rank)
    return rank * (nope + value) + query_len * (query_dim + value) < absorbed


def _absorbed(q: Tensor, latents: Tensor, scale: float, k_up: Tensor, v_up: Tensor) -> Tensor:
    """(t, H, nope + P) x (L, R + P) -> (t, H, V)."""
    nope, rank = k_up.shape[1:]
    in_latents = torch.einsum("thn,hnr->htr", q[..., :nope], k_up)
    queries = torch.cat((in_latents, q[..., nope:].transpose(0, 1)), -1)
    keys = latents.expand(len(queries), -1, -1)
    attended = _causal(queries, keys, keys[..., :rank], scale)
    return torch.einsum("htr,hvr->thv", attended, v_up)


def _expanded(q: Tensor, latents: Tensor, scale: float, k_up: Tensor, v_up: Tensor) -> Tensor:
    """(t, H, nope + P) x (L, R + P) -> (t, H, V)."""
    rank = k_up.shape[2]
    parts: list[Tensor] = []
    for heads in _runs(q.shape[1], _EXPANDED_HEADS):
        keys = torch.einsum("lr,hnr->hln", latents[:, :rank], k_up[heads])
        values = torch.einsum("lr,hvr->hlv", latents[:, :rank], v_up[heads])
        rotated = latents[:, rank:].expand(len(keys), -1, -1)
        queries = q[:, heads].transpose(0, 1)
        parts.append(_causal(queries, torch.cat((keys, rotated), -1), values, scale).transpose(0, 1))
    return torch.cat(parts, 1)


def _causal(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """(H, t, D) x (H, L, D), (H, L, V) -> (H, t, V); the last query is the last key's token."""
    num_queries, num_keys = q.shape[1], k.shape[1]
    tiles: list[Tensor] = []
    for run in _runs(num_queries, _TILE_TOKENS):
        end = num_keys - num_queries + run.stop
        seen = torch.ones(run.stop - run.start, end, dtype=torch.bool, device=q.device)
        mask = seen.tril(end - (run.stop - run.start))
        tiles.append(
            F.scaled_dot_product_attention(q[:, run], k[:, :end], v[:, :end], attn_mask=mask, scale=scale)
        )
    return torch.cat(tiles, 1)


def _runs(count: int, size: int) -> Iterator[slice]:
    return (slice(start, min(start + size, count)) for start in range(0, count, size))
