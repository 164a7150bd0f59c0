"""`kernels.joins` for a rank among others: where tensor-parallel parts are summed, looked up and put together."""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from kernels.joins import ONE_RANK, Joins
from parallel.comm import Comm
from parallel.plans import Range


def tensor_joins(tp: Comm, vocab: Sequence[Range]) -> Joins:
    """`vocab`: the rows of the vocabulary of each rank of the group."""
    if tp.size == 1:
        return ONE_RANK
    first, end = vocab[tp.rank]
    widths = [stop - start for start, stop in vocab]

    def embed(tokens: Tensor, table: Tensor) -> Tensor:
        mine = (tokens >= first) & (tokens < end)
        rows = F.embedding(torch.where(mine, tokens - first, 0), table)
        return tp.all_reduce(rows.masked_fill(~mine[:, None], 0.0))

    def gather_logits(part: Tensor) -> Tensor:
        padded = F.pad(part, (0, max(widths) - part.shape[1]))
        pieces = tp.all_gather(padded)
        return torch.cat([piece[:, :width] for piece, width in zip(pieces, widths, strict=True)], 1)

    return Joins(tp.all_reduce, embed, gather_logits, ONE_RANK.experts)
