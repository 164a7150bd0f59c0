"""`kernels.collectives` for a rank among others: sums, look-ups, and rows sent to their experts."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import reduce

import torch
from torch import Tensor
from torch.nn import functional as F

from kernels.collectives import ONE_RANK, Collectives
from kernels.packed import LookUp
from parallel.comm import Comm
from parallel.expert import Spread
from parallel.plans import Range, even_part


def make_collectives(
    tp: Comm, vocab: Sequence[Range], sum_parts: Callable[[Tensor], Tensor], experts: Spread | None
) -> Collectives:
    """Make the collectives. `vocab` has the rows of the vocabulary of each rank of `tp`. `sum_parts` is that of `summing`.
    `experts` is None where the model has none."""
    spread = ONE_RANK.experts if experts is None else experts
    if tp.size == 1:
        return replace(ONE_RANK, experts=spread)
    first, end = vocab[tp.rank]
    widths = [stop - start for start, stop in vocab]

    def embed(tokens: Tensor, rows: LookUp, dtype: torch.dtype) -> Tensor:
        mine = (tokens >= first) & (tokens < end)
        found = rows(torch.where(mine, tokens - first, 0)).to(dtype).masked_fill(~mine[:, None], 0.0)
        return tp.all_reduce(found) if len(found) else found

    def gather_logits(part: Tensor) -> Tensor:
        padded = F.pad(part, (0, max(widths) - part.shape[1]))
        pieces = tp.all_gather(padded)
        return torch.cat([piece[:, :width] for piece, width in zip(pieces, widths, strict=True)], 1)

    def share(size: int) -> slice:
        return slice(*even_part(size, tp.size, tp.rank))

    return Collectives(sum_parts, embed, gather_logits, spread, share)


def summing(tp: Comm, *, deterministic: bool) -> Callable[[Tensor], Tensor]:
    """Return the sum over `tp` of what each has. All have as many rows, and without any nothing is sent.

    With `deterministic` an element's parts are added up in the order of the ranks, however many elements there are."""
    in_order = deterministic and tp.size > 2

    def total(part: Tensor) -> Tensor:
        if not len(part):
            return part
        return reduce(torch.add, tp.all_gather(part)) if in_order else tp.all_reduce(part)

    return total
