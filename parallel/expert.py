"""Experts spread over ranks: rows travel to the experts that they chose and come back as sums. No row is ever dropped.

Ranks with the same attention have the same rows. Each takes its share of them, sends every row once to each rank that holds any
of its experts, and gets back that rank's weighted sum; then the shares are put together again. Ranks with other sequences take
part in the same exchange with rows of their own, or with none.

How many rows go where depends on what they choose. Launches that are to be captured must not. There all have equally many
rows, and each rank gets all of them and computes its own experts of each; every rank's sums of a row go back to where it is."""

from collections.abc import Callable, Sequence
from functools import reduce
from typing import TypeVar

import torch
from torch import Tensor
from torch.nn import functional as F

from kernels.collectives import LocalExperts
from parallel.balance import Placement
from parallel.comm import Comm
from parallel.plans import even_part

T = TypeVar("T")


class Spread:
    """`kernels.collectives.Collectives.experts` over the ranks `all_ranks`, of which those of `same_rows` have the same rows.

    `sum_parts` adds up what tensor-parallel ranks have of an expert."""

    def __init__(
        self,
        same_rows: Comm,
        all_ranks: Comm,
        slots: Placement,
        sum_parts: Callable[[Tensor], Tensor],
        device: torch.device,
    ) -> None:
        """`slots` has the expert in each slot of all ranks, in every layer, until `place` changes it."""
        self._same_rows, self._all, self._sum_parts, self._device = same_rows, all_ranks, sum_parts, device
        self._first, self._layers = slots, dict[int, _Slots]()
        self._per_rank = len(slots) // all_ranks.size
        self._is_fixed = False

    def fixed(self, launch: Callable[[], T]) -> T:
        """Return what `launch` returns, whose launches depend on the number of rows alone, which is the same on all ranks."""
        self._is_fixed = True
        try:
            return launch()
        finally:
            self._is_fixed = False

    def placement(self, layer: int) -> Placement:
        return self._of(layer).placement

    def place(self, layer: int, slots: Placement) -> None:
        """Take another placement. All ranks must do so between the same two steps, when the weights are there."""
        self._of(layer).place(slots)

    def __call__(
        self, layer: int, x: Tensor, experts: Tensor, weights: Tensor, local: LocalExperts
    ) -> Tensor:
        """(T, hidden) on ranks with the same rows -> (T, hidden) on them."""
        if self._all.size == 1:
            return self._sum_parts(local(x, experts, weights))
        if self._is_fixed:
            return self._everywhere(layer, x, experts, weights, local)
        num_rows, same = len(x), self._same_rows
        shares = [even_part(num_rows, same.size, rank) for rank in range(same.size)]
        first, end = shares[same.rank]
        slots = self._of(layer).choose(experts[first:end])
        mine = self._exchange(x[first:end], slots, weights[first:end], local)
        if same.size == 1 or not num_rows:
            return mine
        width = shares[0][1]
        pieces = same.all_gather(F.pad(mine, (0, 0, 0, width - len(mine))))
        return torch.cat([piece[: stop - start] for piece, (start, stop) in zip(pieces, shares, strict=True)])

    def _of(self, layer: int) -> "_Slots":
        if layer not in self._layers:
            self._layers[layer] = _Slots(self._first, self._device)
        return self._layers[layer]

    def _everywhere(
        self, layer: int, x: Tensor, experts: Tensor, weights: Tensor, local: LocalExperts
    ) -> Tensor:
        """(T, hidden) -> (T, hidden), with as many rows on ranks that have others."""
        rows, slots, weights = map(self._of_groups, (x, self._of(layer).by_rows(experts), weights))
        here = torch.where(slots // self._per_rank == self._all.rank, slots % self._per_rank, -1)
        sums = self._own_rows(self._sum_parts(local(rows, here, weights)), len(x))
        return reduce(torch.add, [part.float() for part in sums]).to(x.dtype)

    def _of_groups(self, x: Tensor) -> Tensor:
        """(T, ...) -> (G * T, ...): what each of the G groups of ranks with the same rows has."""
        same, comm = self._same_rows.size, self._all
        return x if comm.size == same else torch.cat(comm.all_gather(x)[::same])

    def _own_rows(self, sums: Tensor, num_rows: int) -> Sequence[Tensor]:
        """(G * T, hidden) -> (T, hidden) of each rank: its sums of this rank's rows."""
        same, comm = self._same_rows.size, self._all
        if comm.size == same:
            return comm.all_gather(sums)
        counts = [num_rows] * comm.size
        for_each = sums.unflatten(0, (-1, num_rows)).repeat_interleave(same, 0).flatten(0, 1)
        return comm.all_to_all(for_each, counts, counts).split(counts)

    def _exchange(self, x: Tensor, slots: Tensor, weights: Tensor, local: LocalExperts) -> Tensor:
        """Send (n, hidden) out to the ranks of the slots, and return (n, hidden), which comes back."""
        comm, holder = self._all, slots // self._per_rank
        wanted = [(holder == rank).any(1).nonzero()[:, 0] for rank in range(comm.size)]
        sent = [len(rows) for rows in wanted]
        ones = [1] * comm.size
        received = comm.all_to_all(torch.tensor(sent, device=x.device), ones, ones).tolist()
        rows = torch.cat(wanted)
        to = torch.repeat_interleave(
            torch.arange(comm.size, device=x.device), torch.tensor(sent, device=x.device)
        )
        there = torch.where(holder[rows] == to[:, None], slots[rows] % self._per_rank, -1)
        got = local(
            comm.all_to_all(x[rows], sent, received),
            comm.all_to_all(there, sent, received),
            comm.all_to_all(weights[rows], sent, received),
        )
        back = comm.all_to_all(self._sum_parts(got), received, sent)
        out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
        return out.index_add_(0, rows, back.float()).to(x.dtype)


class _Slots:
    """One layer's placement, as tensors that never move."""

    def __init__(self, placement: Placement, device: torch.device) -> None:
        num_experts = max(placement) + 1
        most = len(placement) - num_experts + 1
        self._slots = torch.empty((num_experts, most), dtype=torch.int64, device=device)
        """The slots that hold an expert, repeated where it has fewer."""
        self._num_copies = torch.empty(num_experts, dtype=torch.int64, device=device)
        self._turn = 0
        self.place(placement)

    def place(self, placement: Placement) -> None:
        """Take another placement, of as many slots."""
        self.placement = placement
        num_experts, most = self._slots.shape
        copies: list[list[int]] = [[] for _ in range(num_experts)]
        for slot, expert in enumerate(placement):
            copies[expert].append(slot)
        self._slots.copy_(torch.tensor([(own * most)[:most] for own in copies]))
        self._num_copies.copy_(torch.tensor([len(own) for own in copies]))

    def choose(self, experts: Tensor) -> Tensor:
        """Return the slots of (n, K) experts. Rows take an expert's copies in turn, from step to step."""
        first, self._turn = self._turn, self._turn + len(experts)
        return self._chosen(experts, first)

    def by_rows(self, experts: Tensor) -> Tensor:
        """Return them with a choice of copies that is every step's."""
        return self._chosen(experts, 0)

    def _chosen(self, experts: Tensor, first: int) -> Tensor:
        turns = torch.arange(first, first + len(experts), device=experts.device)[:, None]
        return self._slots[experts, turns % self._num_copies[experts]]
