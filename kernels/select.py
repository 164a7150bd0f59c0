"""Which implementation of the operations runs on a device."""

import torch

from kernels.ops import Ops
from kernels.ref import REFERENCE


def select_ops(device: torch.device) -> Ops:
    """The fastest implementation that works on `device`; pure PyTorch works on all of them."""
    del device
    return REFERENCE
