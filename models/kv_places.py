"""Which of the pool's layers each of a model's layers writes."""

from dataclasses import dataclass

import torch

from models.spec import ModelSpec


@dataclass(frozen=True, slots=True)
class KVPlaces:
    written: tuple[int, ...]
    """For each layer here, the layer of the pool."""
    last: frozenset[int]
    """The layers here behind which a layer of the pool is complete, where others than its own write it; none: an attention layer
    itself says so, as soon as it has written its own."""

    @classmethod
    def of(cls, spec: ModelSpec, layers: range, dtype: torch.dtype) -> "KVPlaces":
        if spec.recurrent is None:
            return cls(tuple(range(len(layers))), frozenset())
        written = spec.recurrent.written(slot_bytes(spec, dtype))
        return cls(written, frozenset({kv_layer: index for index, kv_layer in enumerate(written)}.values()))


def slot_bytes(spec: ModelSpec, dtype: torch.dtype) -> int:
    """Return the bytes of one token's keys and values in one layer of the pool."""
    return spec.kv_layout(1, str(dtype).removeprefix("torch.")).slot_bytes
