"""`kernels.joins` for a rank among others: where parts are summed, looked up and put together, and rows go to their experts."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial, reduce

import torch
from torch import Tensor
from torch.nn import functional as F

from kernels.joins import ONE_RANK, Joins
from parallel.comm import Comm
from parallel.expert import Spread
from parallel.plans import Range


def make_joins(
    tp: Comm, ep: Comm, vocab: Sequence[Range], slots: Sequence[int], deterministic: bool = False
) -> Joins:
    """`vocab`: the rows of the vocabulary of each rank of `tp`; `slots`: which experts the ranks of `ep` hold, in their order.
    `deterministic`: an element's parts are added up in the order of the ranks, however many elements there are."""
    sum_parts = partial(_sum_in_order, tp) if deterministic and tp.size > 2 else tp.all_reduce
    experts = Spread(ep, slots, sum_parts) if slots else ONE_RANK.experts
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

    return Joins(sum_parts, embed, gather_logits, experts)


def _sum_in_order(comm: Comm, x: Tensor) -> Tensor:
    return reduce(torch.add, comm.all_gather(x))
