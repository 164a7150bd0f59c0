"""Selects the implementation of the operations that runs on a device."""

import logging
from collections.abc import Sequence
from dataclasses import replace
from importlib.util import find_spec
from typing import Literal

import torch
from torch import Tensor

from core.errors import ConfigError
from kernels.attention.case import Attend, Backend, Case
from kernels.attention.choosing import Chooser
from kernels.attention.installed import INSTALL, about
from kernels.attention.remembered import ChoiceFile, default_path
from kernels.attention.selecting import select_attention
from kernels.attention.trial import device_timer
from kernels.cpu.invariant_ops import invariant_ops
from kernels.cpu.prepacked import WeightFormat, prepacked_ops
from kernels.kv_parts import KVPart
from kernels.ops import AttentionMeta, KVLayer, Ops
from kernels.packed import FLOAT8_CAPABILITY
from kernels.torch.reference import reference_ops

Kernels = Literal["auto", "triton", "torch", "flashinfer", "flash_attention"]

_log = logging.getLogger(__name__)
EIGHT_BITS = ("float8_e4m3fn", "int8")
"""The names of dtypes that a KV pool has with a scale for each vector."""
_HAS_TRITON = torch.cuda.is_available() and find_spec("triton") is not None
if _HAS_TRITON:
    from kernels.triton.ops import invariant_triton_ops, triton_ops
else:

    def triton_ops(device: torch.device) -> Ops:
        raise AssertionError(f"{device} has Triton's kernels only where triton is installed")

    invariant_triton_ops = triton_ops


def select_ops(
    device: torch.device,
    wanted: Kernels = "auto",
    cases: Sequence[Case] = (),
    kv_dtype: str = "",
    weights: WeightFormat = "full",
    *,
    deterministic: bool = False,
) -> Ops:
    """Return the fastest implementation that works on `device`, or the `wanted` one. Pure PyTorch works on all devices.
    `deterministic` restricts it to those whose bits for a token do not depend on what it is batched with, nor on how its prompt
    is chunked. `cases` are what `paged_attention` will be called with, by which its backend is chosen; none where it is not
    called. `kv_dtype` is that of the KV pool, and `weights` says how a CPU keeps matrices.

    The result is for one model on one thread: implementations may keep scratch memory. Raises ConfigError."""
    if device.type == "cpu":
        if wanted not in ("auto", "torch"):
            raise ConfigError(
                f"engine.kernels is {wanted}, whose kernels run on GPUs only; on a CPU use torch or auto"
            )
        return invariant_ops(weights) if deterministic else prepacked_ops(weights)
    _check_triton(wanted, deterministic=deterministic)
    if kv_dtype in EIGHT_BITS:
        _check_eight_bits(device, wanted, kv_dtype)
    chosen = "torch" if wanted == "torch" or not _HAS_TRITON else "triton"
    _log.info("kernels on %s: %s", torch.cuda.get_device_name(device), chosen)
    if deterministic:
        return invariant_triton_ops(device)
    ops = reference_ops() if chosen == "torch" else triton_ops(device)
    if kv_dtype in EIGHT_BITS:
        return ops
    chooser = Chooser(device, about(device), ChoiceFile(default_path()), device_timer(device))
    attention = select_attention(wanted, cases, Backend(chosen, ops.paged_attention), chooser)
    paged_attention = with_own(ops.paged_attention, attention)
    fixed_step = None if wanted in INSTALL else ops.fixed_step
    return replace(ops, paged_attention=paged_attention, fixed_step=fixed_step)


def with_own(own: Attend, chosen: Attend) -> Attend:
    """Return `chosen`, but for steps whose lengths it would have to read from memory, or in which tokens see later ones, and for
    layers that have a part of a pool's heads: other people's kernels do none of it."""

    def attend(
        q: Tensor, kv_layer: KVLayer, meta: AttentionMeta, scale: float, window: int, soft_cap: float, sinks: Tensor | None
    ) -> Tensor:  # fmt: skip
        is_own = meta.is_fixed or meta.both_ways or isinstance(kv_layer, KVPart)
        taken = own if is_own else chosen
        return taken(q, kv_layer, meta, scale, window, soft_cap, sinks)

    return attend


def _check_eight_bits(device: torch.device, wanted: Kernels, kv_dtype: str) -> None:
    if wanted in INSTALL:
        raise ConfigError(
            f"engine.kernels is {wanted}, which reads no KV of 8 bits with a scale for each vector: leave engine.kernels or "
            "engine.kv_dtype at auto"
        )
    if kv_dtype != "int8" and wanted != "torch" and _HAS_TRITON and _capability(device) < FLOAT8_CAPABILITY:
        raise ConfigError(
            "engine.kv_dtype is float8, which Triton's kernels read from compute capability 9.0 on: use int8"
        )


def _capability(device: torch.device) -> int:
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


def _check_triton(wanted: Kernels, *, deterministic: bool) -> None:
    if wanted == "triton" and not _HAS_TRITON:
        raise ConfigError(
            "engine.kernels is triton, but triton is not installed: pip install 'baton-serve[triton]'"
        )
    if deterministic and (wanted not in ("auto", "triton") or not _HAS_TRITON):
        raise ConfigError(
            "engine.deterministic needs Triton's kernels on a GPU: pip install 'baton-serve[triton]' and leave engine.kernels "
            "at auto"
        )
