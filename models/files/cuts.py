"""Which elements of a tensor a rank reads."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def indices(cut: Sequence[Sequence[slice]]) -> list[Tensor]:
    """Return the indices that a cut leaves, for each dimension."""
    return [torch.cat([torch.arange(run.start, run.stop) for run in runs]) for runs in cut]


def part_at(stored: Any, cut: Sequence[Sequence[slice]], chosen: tuple[slice, ...] = ()) -> Tensor:
    """Return the part of a tensor, or of safetensors' slice, of which indexing reads just those bytes."""
    if len(chosen) == len(cut):
        return stored[chosen]
    parts = [part_at(stored, cut, (*chosen, run)) for run in cut[len(chosen)]]
    return parts[0] if len(parts) == 1 else torch.cat(parts, len(chosen))
