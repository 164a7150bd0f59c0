"""States of float32 in the slots of a pool whose tokens have one vector each."""

from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.states import FLOAT_BYTES


@dataclass(frozen=True, slots=True)
class StateSlots:
    """A layer's states, in the first slots of each sequence's first blocks."""

    num_rows: int
    size: int
    """Numbers of a row."""

    def read(self, kv_layer: Tensor, blocks: Tensor) -> Tensor:
        """(B, blocks of a state) int64 -> (B, rows, size) float32."""
        stored = kv_layer.flatten(0, 3)[self._slots(kv_layer, blocks)].flatten(1).view(torch.float32)
        return stored[:, : self.num_rows * self.size].unflatten(1, (self.num_rows, self.size))

    def write(self, kv_layer: Tensor, blocks: Tensor, states: Tensor) -> None:
        slots, flat = self._slots(kv_layer, blocks), states.flatten(1)
        room = slots.shape[1] * kv_layer.shape[4] * kv_layer.itemsize // FLOAT_BYTES
        filled = torch.nn.functional.pad(flat, (0, room - flat.shape[1])).view(kv_layer.dtype)
        kv_layer.flatten(0, 3)[slots] = filled.unflatten(1, (slots.shape[1], -1))

    def _slots(self, kv_layer: Tensor, blocks: Tensor) -> Tensor:
        """(B, blocks of a state) int64 -> (B, slots of a state) int64."""
        size, slot_bytes = kv_layer.shape[3], kv_layer.shape[4] * kv_layer.itemsize
        count = -(-self.num_rows * self.size * FLOAT_BYTES // slot_bytes)
        at = torch.arange(count, device=blocks.device)
        return blocks[:, at // size] * size + at % size
