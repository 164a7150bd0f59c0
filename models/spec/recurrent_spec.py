"""What the layers of a hybrid model keep of a sequence: keys and values of each token, or one recurrent state.

The layers that keep a state share the slots of the KV layers out evenly, in their order (`kernels.states` says what a slot is).
Where a state lies depends on the model alone, whatever the mesh, and a pipeline is cut only where no state is parted from the KV
layer in which it lies. Invariant: no two states have a slot in common."""

import math
from dataclasses import dataclass
from typing import Literal

from kernels.states import FLOAT_BYTES, StatePlace, StateShape
from models.spec.stage_starts import stage_starts

StateKind = Literal["kv", "gated_delta", "channel_delta", "state_space", "short_convolution", "none"]
"""`channel_delta` is a gated delta rule by which each channel decays by itself; `none` is a layer without a token mixer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecurrentSpec:
    kinds: tuple[StateKind, ...]
    """What each layer of the model keeps. Some keep keys and values."""
    shape: StateShape
    """The shape of the state of each layer that keeps one."""
    num_parts: int = 1
    """Parts of each state: as many as the pool has heads, or one."""
    by_kind: bool = False
    """Whether a checkpoint has matrices of their own for a gated delta net's queries, keys and values, gates, strengths and
    decays; otherwise all that one key head has lies together."""
    conv_bias: bool = False
    projection_bias: bool = False

    @property
    def part(self) -> StateShape:
        """The shape of a part of a state."""
        return self.shape.share(1, self.num_parts)

    def held(self, num_value_heads: int) -> StateShape:
        """Return the shape of what a rank with so many value heads has of a state."""
        return self.shape.share(num_value_heads // self.part.num_value_heads, self.num_parts)

    @property
    def num_kv_layers(self) -> int:
        return self.kinds.count("kv")

    @property
    def has_state(self) -> tuple[bool, ...]:
        """For each layer whether it keeps a state."""
        return tuple(kind not in ("kv", "none") for kind in self.kinds)

    @property
    def written(self) -> tuple[int, ...]:
        """For each layer which KV layer it writes: that of its keys and values, or that of its state. One that writes nothing has
        the number of the layer before it, so that no stage begins with it."""
        num_states, num_kv, num_before = sum(self.has_state), 0, 0
        found: list[int] = []
        for kind in self.kinds:
            match kind:
                case "kv":
                    found.append(num_kv)
                    num_kv += 1
                case "none":
                    found.append(found[-1] if found else 0)
                case _:
                    found.append(num_before * self.num_kv_layers // num_states)
                    num_before += 1
        return tuple(found)

    @property
    def stage_starts(self) -> tuple[int, ...]:
        """The layers that a stage of a pipeline may begin with."""
        return stage_starts(self.written)

    def kv_layers(self, first: int, end: int) -> tuple[int, int]:
        """Return the range of KV layers that a stage with layers [first, end) has."""
        return self.kinds[:first].count("kv"), self.kinds[:end].count("kv")

    def places(self, slot_bytes: int) -> tuple[StatePlace | None, ...]:
        """Return where each layer's state lies; None where it keeps none."""
        num_slots = math.ceil(self.part.num_floats * FLOAT_BYTES * self.num_parts / slot_bytes)
        used = [0] * self.num_kv_layers
        found: list[StatePlace | None] = []
        for has_state, kv_layer in zip(self.has_state, self.written, strict=True):
            if not has_state:
                found.append(None)
                continue
            found.append(StatePlace(kv_layer, used[kv_layer], num_slots))
            used[kv_layer] += num_slots
        return tuple(found)

    def num_slots(self, slot_bytes: int) -> int:
        """Return how many slots of each KV layer a sequence's states take."""
        ends = [place.first_slot + place.num_slots for place in self.places(slot_bytes) if place]
        return max(ends, default=0)
