"""What transformers' cache keeps of a sequence, where Baton's pool stores it and transformers itself attends.

Some of it grows by an entry a token. The rest has a fixed size: recurrent states, and the last inputs of convolutions. These
bytes take the first blocks of a sequence, as a `RecurrentSpec`'s do. Invariant: no byte of a state is in a token's slot."""

from dataclasses import dataclass, replace

from core.kv import DTYPE_BYTES, KVLayout, num_blocks_for

_STATE_SLOTS = 2048
"""The slots that a state takes where tokens need none. So a longer sequence takes twice its state at most."""
_LEAST_DIM = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class ForeignCache:
    num_layers: int
    """The layers of the pool."""
    num_kv_heads: int
    head_dim: int
    state_bytes: int = 0
    grows: bool = True
    """Whether tokens have numbers in it."""
    attends: tuple[int, ...] | None = None
    """The layers that attend through transformers' interface, where all others that keep something keep states. Each has a layer
    of the pool, in this order. None where it is not so."""
    is_whole: bool = False
    """Whether a token's numbers are stored one after the other, so that ranks cannot share the heads out."""

    @classmethod
    def of_numbers(
        cls, numbers: int, state_bytes: int, attends: tuple[int, ...] | None = None
    ) -> "ForeignCache":
        """Return it where a token has so many numbers over all layers."""
        dim = -(-numbers // 2) or -(-state_bytes // (2 * DTYPE_BYTES["float32"] * _STATE_SLOTS))
        return cls(
            num_layers=1,
            num_kv_heads=1,
            head_dim=max(_LEAST_DIM, dim),
            state_bytes=state_bytes,
            grows=numbers > 0,
            attends=attends,
            is_whole=True,
        )

    @property
    def num_kv_layers(self) -> int:
        return self.num_layers

    @property
    def stage_starts(self) -> tuple[int, ...]:
        """The layers that a stage of a pipeline may begin with: one stage has the cache."""
        return (0,)

    def kv_layers(self, first: int, end: int) -> tuple[int, int]:
        """Return the range of the pool's layers that the only stage has."""
        del first, end
        return 0, self.num_layers

    def layout(self, block_size: int, dtype: str) -> KVLayout:
        layout = KVLayout(
            num_layers=self.num_layers,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            block_size=block_size,
            dtype=dtype,
        )
        return replace(layout, state_blocks=num_blocks_for(self.num_slots(layout.slot_bytes), block_size))

    def num_slots(self, slot_bytes: int) -> int:
        """Return how many slots of each layer of the pool a sequence's states take."""
        return -(-self.state_bytes // (slot_bytes * self.num_layers))
