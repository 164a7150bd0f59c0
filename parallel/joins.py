"""`kernels.joins` for a rank among others: where parts are summed, looked up and put together, and rows go to their experts."""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn import functional as F

from kernels.joins import ONE_RANK, Joins
from parallel.comm import Comm
from parallel.expert import Spread
from parallel.plans import Range


def make_joins(tp: Comm, ep: Comm, vocab: Sequence[Range], slots: Sequence[int]) -> Joins:
    """`vocab`: the rows of the vocabulary of each rank of `tp`; `slots`: which experts the ranks of `ep` hold, in their order."""
    experts = Spread(ep, slots, tp.all_reduce) if slots else ONE_RANK.experts
    if tp.size == 1:
        return replace(ONE_RANK, experts=experts)
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

    return Joins(tp.all_reduce, embed, gather_logits, experts)
