"""Which of the pool's layers each of a model's layers writes, and which of its heads."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.head_places import HeadPlaces
from kernels.kv_parts import KVPart
from kernels.ops import KVLayer
from models.spec.model_spec import ModelSpec


@dataclass(frozen=True, slots=True)
class KVPlaces:
    written: tuple[int, ...]
    """For each layer here, which of the pool's layers here it writes, or reads where it has no keys and values of its own."""
    completed: Mapping[int, int]
    """The layers here behind which a layer of the pool is complete, where others than its own write it, and that layer's number
    in the whole model's KV. Empty: an attention layer itself says so, as soon as it has written its own."""
    heads: tuple[HeadPlaces | None, ...] = ()
    """For each layer here which of the pool's heads it has; None for all. Empty: all have all."""

    @classmethod
    def of(cls, spec: ModelSpec, layers: range) -> "KVPlaces":
        kept = spec.recurrent or spec.kv
        if kept is None:
            return cls(tuple(range(len(layers))), {})
        own = slice(layers.start, layers.stop)
        written = kept.written[own]
        writers = [index for index in range(len(written)) if spec.has_mixer(layers[index])]
        if spec.kv is not None:
            writers = [index for index in writers if spec.kv.owns(layers[index])]
        last = {written[index]: index for index in writers}
        completed = {index: kv_layer for kv_layer, index in last.items()}
        heads = () if spec.kv is None else spec.kv.places[own]
        return cls(tuple(kv_layer - min(written) for kv_layer in written), completed, heads)

    def layer(self, kv: Sequence[KVLayer], index: int) -> KVLayer:
        """Return the KV of a layer here, in the pool's layers `kv`."""
        pool = kv[self.written[index]]
        places = self.heads[index] if self.heads else None
        if places is None:
            return pool
        assert isinstance(pool, Tensor), "a part of a pool has no scales"
        return KVPart(pool, places)


def has_states(spec: ModelSpec) -> bool:
    """Return whether layers keep a state of each sequence, which takes each token in once."""
    kept = spec.recurrent
    is_own = spec.compressed is not None or (kept is not None and any(kept.has_state))
    return is_own or (spec.cache is not None and spec.cache.state_bytes > 0)


def slot_bytes(spec: ModelSpec, dtype: torch.dtype) -> int:
    """Return the bytes of one token's keys and values in one layer of the pool."""
    return spec.kv_layout(1, str(dtype).removeprefix("torch.")).slot_bytes
