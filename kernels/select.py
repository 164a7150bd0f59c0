"""Which implementation of the operations runs on a device."""

import logging
from importlib.util import find_spec
from typing import Literal

import torch

from core.errors import ConfigError
from kernels.invariant import invariant_ops
from kernels.ops import Ops
from kernels.ref import reference_ops

Kernels = Literal["auto", "triton", "torch"]

_log = logging.getLogger(__name__)
_HAS_TRITON = torch.cuda.is_available() and find_spec("triton") is not None
if _HAS_TRITON:
    from kernels.triton.ops import invariant_triton_ops, triton_ops
else:
    triton_ops = invariant_triton_ops = reference_ops


def select_ops(device: torch.device, wanted: Kernels = "auto", deterministic: bool = False) -> Ops:
    """The fastest implementation that works on `device`, or the `wanted` one; pure PyTorch works on all of them. `deterministic`:
    of those whose bits for a token do not depend on what it is batched with, nor on how its prompt is chunked.

    One model's, on one thread: implementations may keep scratch memory. Raises ConfigError."""
    if device.type == "cpu":
        if wanted == "triton":
            raise ConfigError(
                "engine.kernels is triton, whose kernels run on GPUs only; on a CPU use torch or auto"
            )
        return invariant_ops() if deterministic else reference_ops()
    if wanted == "triton" and not _HAS_TRITON:
        raise ConfigError(
            "engine.kernels is triton, but triton is not installed: pip install 'baton-serve[triton]'"
        )
    if deterministic and (wanted == "torch" or not _HAS_TRITON):
        raise ConfigError(
            "engine.deterministic needs Triton's kernels on a GPU: pip install 'baton-serve[triton]' and leave engine.kernels "
            "at auto"
        )
    chosen = "torch" if wanted == "torch" or not _HAS_TRITON else "triton"
    _log.info("kernels on %s: %s", torch.cuda.get_device_name(device), chosen)
    if chosen == "torch":
        return reference_ops()
    return invariant_triton_ops() if deterministic else triton_ops()
