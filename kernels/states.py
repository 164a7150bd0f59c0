"""The size of a recurrent state, and its place in the KV pool.

A state of one layer has as many parts as the pool has heads, so that it is cut and handed over as keys and values are; or one,
where heads of states cannot be shared out so. A part is a row of float32: the last inputs of a short convolution, (channels,
kernel - 1), and then a matrix for each of its value heads, (value heads, key_dim, value_dim). A key head that several parts share
is in each. A part lies in its head of the slots of a KV layer: a slot has the bytes of one token's keys and values, in the order
(plane, dimension), and where there is one part alone, (head, plane, dimension)."""

from dataclasses import dataclass, replace

FLOAT_BYTES = 4
"""A state is float32 whatever the model computes in: it sums up all that came before."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StateShape:
    num_key_heads: int
    """Each of them serves as many neighbouring value heads."""
    num_value_heads: int
    key_dim: int
    value_dim: int
    conv_kernel: int
    """How many inputs, the current one included, the convolution sees."""

    def can_have(self, num_parts: int) -> bool:
        """Return whether the heads are shared out evenly."""
        keys, values = self.num_key_heads, self.num_value_heads
        return values % num_parts == 0 and (keys % num_parts == 0 or num_parts % keys == 0)

    def share(self, count: int, num_parts: int) -> "StateShape":
        """Return the shape of `count` neighbours of `num_parts` parts."""
        keys, values = self.num_key_heads * count // num_parts, self.num_value_heads * count // num_parts
        return replace(self, num_key_heads=max(1, keys), num_value_heads=values)

    @property
    def key_size(self) -> int:
        return self.num_key_heads * self.key_dim

    @property
    def value_size(self) -> int:
        return self.num_value_heads * self.value_dim

    @property
    def conv_channels(self) -> int:
        """Two vectors for each key head, and one for each value head."""
        return 2 * self.key_size + self.value_size

    @property
    def conv_floats(self) -> int:
        return self.conv_channels * (self.conv_kernel - 1)

    @property
    def num_floats(self) -> int:
        return self.conv_floats + self.key_dim * self.value_size


@dataclass(frozen=True, slots=True)
class StatePlace:
    """Slots [first_slot, first_slot + num_slots) of a sequence's first blocks, in one KV layer."""

    kv_layer: int
    first_slot: int
    num_slots: int
