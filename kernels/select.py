"""Which implementation of the operations runs on a device."""

import logging
from collections.abc import Sequence
from dataclasses import replace
from importlib.util import find_spec
from typing import Literal

import torch

from core.errors import ConfigError
from kernels.attention.case import Backend, Case
from kernels.attention.choosing import Chooser
from kernels.attention.installed import about
from kernels.attention.remembered import ChoiceFile, default_path
from kernels.attention.selecting import select_attention
from kernels.attention.trial import device_timer
from kernels.invariant import invariant_ops
from kernels.ops import Ops
from kernels.ref import reference_ops

Kernels = Literal["auto", "triton", "torch", "flashinfer", "flash_attention"]

_log = logging.getLogger(__name__)
_HAS_TRITON = torch.cuda.is_available() and find_spec("triton") is not None
if _HAS_TRITON:
    from kernels.triton.ops import invariant_triton_ops, triton_ops
else:
    triton_ops = invariant_triton_ops = reference_ops


def select_ops(
    device: torch.device, wanted: Kernels = "auto", deterministic: bool = False, cases: Sequence[Case] = ()
) -> Ops:
    """The fastest implementation that works on `device`, or the `wanted` one; pure PyTorch works on all of them. `deterministic`:
    of those whose bits for a token do not depend on what it is batched with, nor on how its prompt is chunked. `cases`: what
    `paged_attention` will be called with, by which its backend is chosen; none where it is not called.

    One model's, on one thread: implementations may keep scratch memory. Raises ConfigError."""
    if device.type == "cpu":
        if wanted not in ("auto", "torch"):
            raise ConfigError(
                f"engine.kernels is {wanted}, whose kernels run on GPUs only; on a CPU use torch or auto"
            )
        return invariant_ops() if deterministic else reference_ops()
    _check_triton(wanted, deterministic)
    chosen = "torch" if wanted == "torch" or not _HAS_TRITON else "triton"
    _log.info("kernels on %s: %s", torch.cuda.get_device_name(device), chosen)
    if deterministic:
        return invariant_triton_ops()
    ops = reference_ops() if chosen == "torch" else triton_ops()
    chooser = Chooser(device, about(device), ChoiceFile(default_path()), device_timer(device))
    attention = select_attention(wanted, cases, Backend(chosen, ops.paged_attention), chooser)
    return replace(ops, paged_attention=attention)


def _check_triton(wanted: Kernels, deterministic: bool) -> None:
    if wanted == "triton" and not _HAS_TRITON:
        raise ConfigError(
            "engine.kernels is triton, but triton is not installed: pip install 'baton-serve[triton]'"
        )
    if deterministic and (wanted not in ("auto", "triton") or not _HAS_TRITON):
        raise ConfigError(
            "engine.deterministic needs Triton's kernels on a GPU: pip install 'baton-serve[triton]' and leave engine.kernels "
            "at auto"
        )
