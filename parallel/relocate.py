"""Moves experts' weights between ranks, straight from slot to slot, so that a placement becomes another one."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from parallel.balance import Placement
from parallel.comm import Comm


@dataclass(frozen=True, slots=True)
class Move:
    """An expert's weights go from slot `source` to slot `slot`, counted over all ranks."""

    source: int
    slot: int


def moves(old: Placement, new: Placement, num_ranks: int) -> list[Move]:
    """What is to be copied, all of it from what was there before. Holders of a wanted expert send by turns."""
    per_rank = len(old) // num_ranks
    holders: dict[int, list[int]] = {}
    for slot, expert in enumerate(old):
        holders.setdefault(expert, []).append(slot)
    sent = [0] * num_ranks
    found: list[Move] = []
    for slot, expert in enumerate(new):
        if old[slot] == expert:
            continue
        source = min(
            holders[expert], key=lambda s: (s // per_rank != slot // per_rank, sent[s // per_rank], s)
        )
        sent[source // per_rank] += source // per_rank != slot // per_rank
        found.append(Move(source, slot))
    return found


def relocate(comm: Comm, old: Placement, new: Placement, tensors: Sequence[Tensor]) -> int:
    """Changes `tensors`, each (slots of this rank, ...), in place; returns the bytes that came from others. All ranks must call.

    Holds at most what one tensor sends and receives besides: it is copied out before anything is overwritten."""
    per_rank = len(old) // comm.size
    todo = moves(old, new, comm.size)
    out = sorted((m for m in todo if m.source // per_rank == comm.rank), key=lambda m: m.slot // per_rank)
    into = sorted((m for m in todo if m.slot // per_rank == comm.rank), key=lambda m: m.source // per_rank)
    sent = [sum(m.slot // per_rank == rank for m in out) for rank in range(comm.size)]
    received = [sum(m.source // per_rank == rank for m in into) for rank in range(comm.size)]
    num_bytes = 0
    for tensor in tensors:
        reads = torch.tensor([m.source % per_rank for m in out], dtype=torch.int64, device=tensor.device)
        writes = torch.tensor([m.slot % per_rank for m in into], dtype=torch.int64, device=tensor.device)
        got = comm.all_to_all(tensor[reads], sent, received)
        tensor[writes] = got
        num_bytes += (len(into) - received[comm.rank]) * tensor[0].nbytes
    return num_bytes
