"""Which elements of a tensor a rank reads."""

from collections.abc import Sequence

import torch
from torch import Tensor


def indices(cut: Sequence[Sequence[slice]]) -> list[Tensor]:
    """Return the indices that a cut leaves, for each dimension."""
    return [torch.cat([torch.arange(run.start, run.stop) for run in runs]) for runs in cut]
