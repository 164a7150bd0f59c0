"""The choice of the tokens that a query attends to, and attention to them, in pure PyTorch, over a paged cache of latents with
index keys behind them (arXiv:2512.02556, section 2.1)."""

from collections.abc import Iterator

import torch
from torch import Tensor

from kernels.ops import AttentionMeta, Latents
from kernels.torch.stored_latents import blocks_of, tokens_of

MOST_NUMBERS = 1 << 19
"""Numbers of the largest tensor that exists on the way, unless one query takes more: what a processor's cache holds."""


def select_tokens(q: Tensor, weights: Tensor, kv_layer: Latents, meta: AttentionMeta, top_k: int) -> Tensor:
    """`Ops.select_tokens`."""
    num_heads, size = q.shape[1:]
    found = torch.empty((len(q), top_k), dtype=torch.int64, device=q.device)
    for seq, context in enumerate(meta.context_lens):
        table = meta.block_tables[seq].to(q.device)
        keys = blocks_of(kv_layer, table, slice(-size, None)).flatten(0, 3)[:context].float()
        slots = slots_of(table, kv_layer.shape[3])[:context]
        first, end = meta.query_starts[seq : seq + 2]
        for rows in runs(first, end, num_heads * context):
            seen = context - (end - rows.stop)
            scores = index_scores(q[rows].float(), weights[rows], keys[:seen])
            found[rows] = slots[highest(hide_later(scores), top_k)]
    return found


def index_scores(q: Tensor, weights: Tensor, keys: Tensor) -> Tensor:
    """(t, J, I), (t, J), (L, I), all float32 -> (t, L)."""
    return ((q @ keys.T).relu_() * weights[..., None]).sum(1)


def hide_later(scores: Tensor) -> Tensor:
    """(t, L) -> the same, with -inf for tokens that a query does not see; the last query is the last token."""
    num_queries, num_tokens = scores.shape
    seen = torch.ones_like(scores, dtype=torch.bool).tril(num_tokens - num_queries)
    return scores.masked_fill_(~seen, -torch.inf)


def highest(scores: Tensor, count: int) -> Tensor:
    """(t, L) -> (t, count) int64: which scores are the highest, in ascending order; of equal ones the first. There are at least
    `count` finite ones. PyTorch's own choice among equal scores is anyone's."""
    least = scores.topk(count, -1, sorted=False).values.amin(-1, keepdim=True)
    above, equal = scores > least, scores == least
    left = count - above.sum(-1, keepdim=True)
    taken = above | (equal & (equal.cumsum(-1, dtype=torch.int32) <= left))
    # What is not taken goes to one more place, which is cut off.
    places = torch.where(taken, taken.cumsum(-1, dtype=torch.int32) - 1, count).long()
    found = torch.zeros((len(scores), count + 1), dtype=torch.int64, device=scores.device)
    tokens = torch.arange(scores.shape[1], device=scores.device).expand_as(scores)
    return found.scatter_(1, places, tokens)[:, :count]


def slots_of(table: Tensor, block_size: int) -> Tensor:
    """(blocks,) -> (blocks * block_size,) int64."""
    return (table[:, None] * block_size + torch.arange(block_size, device=table.device)).flatten()


def selected_attention(
    q: Tensor, kv_layer: Latents, slots: Tensor, meta: AttentionMeta, scale: float, k_up: Tensor, v_up: Tensor
) -> Tensor:
    """`Ops.selected_attention`: queries are brought into the latent space."""
    del meta  # the slots say all
    nope, rank = k_up.shape[1:]
    queries = torch.cat((torch.einsum("thn,hnr->thr", q[..., :nope], k_up), q[..., nope:]), -1)
    size, attended = queries.shape[2], queries.new_empty((*queries.shape[:2], rank))
    for rows in runs(0, len(q), slots.shape[1] * size):
        latents = tokens_of(kv_layer, slots[rows], size).to(q.dtype)
        attended[rows] = attend_to(queries[rows], latents, scale, rank)
    return torch.einsum("thr,hvr->thv", attended, v_up)


def attend_to(queries: Tensor, latents: Tensor, scale: float, rank: int) -> Tensor:
    """(t, H, R + P), (t, K, R + P) -> (t, H, R)."""
    weights = (queries @ latents.mT * scale).float().softmax(-1).to(queries.dtype)
    return weights @ latents[..., :rank]


def runs(first: int, end: int, numbers: int) -> Iterator[slice]:
    """Yield slices of the rows from `first` to `end`, each of which is `numbers` in the largest tensor."""
    size = max(1, MOST_NUMBERS // numbers)
    return (slice(start, min(start + size, end)) for start in range(first, end, size))
