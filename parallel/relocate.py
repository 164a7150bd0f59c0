"""Moves experts' weights between ranks, straight from slot to slot."""

from collections.abc import Sequence

import torch
from torch import Tensor

from parallel.comm import Comm
from parallel.moves import Move


def relocate(comm: Comm, moves: Sequence[Move], per_rank: int, tensors: Sequence[Tensor]) -> int:
    """Change `tensors`, each (`per_rank`, ...), in place, and return the bytes that came from others. All ranks must call.

    It holds what one tensor sends and receives besides, since that is copied out before anything is overwritten."""
    out = sorted((m for m in moves if m.source // per_rank == comm.rank), key=lambda m: m.slot // per_rank)
    into = sorted((m for m in moves if m.slot // per_rank == comm.rank), key=lambda m: m.source // per_rank)
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
