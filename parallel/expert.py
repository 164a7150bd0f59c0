"""Experts spread over ranks: rows travel to the experts that they chose and come back as sums. No row is ever dropped.

Attention is the same on every rank of the group, so all have all rows. Each takes its share of them, sends every row once to each
rank that holds any of its experts, and gets back that rank's weighted sum; then the shares are put together again."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from kernels.joins import LocalExperts
from parallel.comm import Comm
from parallel.plans import even_part


class Spread:
    """`kernels.joins.Joins.experts` over the ranks `ep`; `sum_parts` adds up what tensor-parallel ranks have of an expert."""

    def __init__(self, ep: Comm, slots: Sequence[int], sum_parts: Callable[[Tensor], Tensor]) -> None:
        """`slots`: the expert in each slot of all ranks, of each rank as many; an expert may be in several."""
        self._ep, self._sum_parts = ep, sum_parts
        self._per_rank = len(slots) // ep.size
        copies: list[list[int]] = [[] for _ in range(max(slots) + 1)]
        for slot, expert in enumerate(slots):
            copies[expert].append(slot)
        most = max(map(len, copies))
        self._slots = torch.tensor([(own * most)[:most] for own in copies])
        """(experts, most): the slots that hold an expert, repeated where it has fewer."""
        self._num_copies = torch.tensor([len(own) for own in copies])

    def __call__(
        self, layer: int, x: Tensor, experts: Tensor, weights: Tensor, local: LocalExperts
    ) -> Tensor:
        """(T, hidden) on every rank -> (T, hidden) on every rank."""
        del layer
        if self._ep.size == 1:
            return self._sum_parts(local(x, experts, weights))
        num_rows, ranks = len(x), range(self._ep.size)
        shares = [even_part(num_rows, self._ep.size, rank) for rank in ranks]
        first, end = shares[self._ep.rank]
        slots = self._choose(experts[first:end], first)
        mine = self._exchange(x[first:end], slots, weights[first:end], local)
        width = shares[0][1]
        pieces = self._ep.all_gather(F.pad(mine, (0, 0, 0, width - len(mine))))
        return torch.cat([piece[: stop - start] for piece, (start, stop) in zip(pieces, shares, strict=True)])

    def _choose(self, experts: Tensor, first_row: int) -> Tensor:
        """(n, K) experts -> slots. Rows take an expert's copies by turns."""
        turns = torch.arange(first_row, first_row + len(experts), device=experts.device)[:, None]
        copy = turns % self._num_copies.to(experts.device)[experts]
        return self._slots.to(experts.device)[experts, copy]

    def _exchange(self, x: Tensor, slots: Tensor, weights: Tensor, local: LocalExperts) -> Tensor:
        """(n, hidden) -> (n, hidden): out to the ranks of the slots, and back."""
        ep, holder = self._ep, slots // self._per_rank
        wanted = [(holder == rank).any(1).nonzero()[:, 0] for rank in range(ep.size)]
        sent = [len(rows) for rows in wanted]
        ones = [1] * ep.size
        received = ep.all_to_all(torch.tensor(sent, device=x.device), ones, ones).tolist()
        rows = torch.cat(wanted)
        to = torch.repeat_interleave(
            torch.arange(ep.size, device=x.device), torch.tensor(sent, device=x.device)
        )
        there = torch.where(holder[rows] == to[:, None], slots[rows] % self._per_rank, -1)
        got = local(
            ep.all_to_all(x[rows], sent, received),
            ep.all_to_all(there, sent, received),
            ep.all_to_all(weights[rows], sent, received),
        )
        back = ep.all_to_all(self._sum_parts(got), received, sent)
        out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
        return out.index_add_(0, rows, back.float()).to(x.dtype)
