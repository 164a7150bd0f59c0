"""Rounding to 4 bits by whole steps of a scale, written out in PyTorch ([ADR 097](../../../docs/adr/097-native-cpu-kernels.md#four-bits-in-steps))."""

import torch
from torch import Tensor
from torch.nn import functional as F


def in_steps(matrix: Tensor, group: int) -> tuple[Tensor, Tensor, Tensor]:
    """matrix (N, K) float32 to scales (N, S, 1, 1) bfloat16, steps (N, S, group / 32, 1) and numbers (N, S, group / 32, 32) of -8 to
    7, both whole; S spans of `group` inputs share a scale, with which their largest magnitude is 120. Each 32 of them have a step,
    the least with which -8 is at most half a step short of their largest magnitude."""
    parts = F.pad(matrix, (0, -matrix.shape[1] % group)).unflatten(1, (-1, group // 32, 32))
    scales = (parts.abs().amax((2, 3), keepdim=True) / 120).bfloat16()
    most, least = parts.amax(3, keepdim=True), parts.amin(3, keepdim=True)
    largest = torch.where(most >= -least, most, least)
    steps = -largest.sign() * (largest.abs() / scales.float() / 8.5).ceil().clamp(max=15).nan_to_num()
    numbers = (parts / (steps * scales.float())).round().clamp(-8, 7).nan_to_num()
    return scales, steps, numbers
