"""Which of the pool's layers each of a model's layers writes."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from models.spec import ModelSpec


@dataclass(frozen=True, slots=True)
class KVPlaces:
    written: tuple[int, ...]
    """For each layer here, which of the pool's layers here it writes."""
    completed: Mapping[int, int]
    """The layers here behind which a layer of the pool is complete, where others than its own write it, and that layer's number
    in the whole model's KV. Empty: an attention layer itself says so, as soon as it has written its own."""

    @classmethod
    def of(cls, spec: ModelSpec, layers: range) -> "KVPlaces":
        if spec.recurrent is None:
            return cls(tuple(range(len(layers))), {})
        written = spec.recurrent.written[layers.start : layers.stop]
        last = {kv_layer: index for index, kv_layer in enumerate(written)}
        completed = {index: kv_layer for kv_layer, index in last.items()}
        return cls(tuple(kv_layer - min(written) for kv_layer in written), completed)


def slot_bytes(spec: ModelSpec, dtype: torch.dtype) -> int:
    """Return the bytes of one token's keys and values in one layer of the pool."""
    return spec.kv_layout(1, str(dtype).removeprefix("torch.")).slot_bytes
