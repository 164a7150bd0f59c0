"""What layers keep of a sequence whose older tokens are summed up in entries (DeepSeek-AI, "DeepSeek-V4", 2026).

Each token has a vector that is key and value of all heads, to which the next `window` tokens attend. In most layers every `rate`
tokens also become one entry, to which all later tokens attend, or those that choose it.

An entry is known with the last token of its window, and is stored in pieces with the tokens that follow: so a token's slot is
written once, with the token. What is known of a window that is not complete, and the last entry, are the sequence's state, in its
first blocks (`docs/adr/101-one-pool-of-one-shape.md`)."""

from dataclasses import dataclass

from core.kv import DTYPE_BYTES, KVLayout, num_blocks_for
from kernels.states import FLOAT_BYTES


@dataclass(frozen=True, slots=True, kw_only=True)
class EntryIndexSpec:
    """How queries choose the entries that they attend to."""

    num_heads: int
    head_dim: int
    top_k: int
    """How many entries a query attends to, where it sees more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CompressedSpec:
    rates: tuple[int, ...]
    """For each layer how many tokens become one entry; 0: none do."""
    chooses: tuple[bool, ...]
    """Whether queries of each layer choose among its entries. Each of these is of two neighbouring windows."""
    index: EntryIndexSpec
    window: int
    head_dim: int
    rope_dim: int
    """The last dimensions of a head, which are rotated."""
    q_rank: int
    out_groups: int
    """Groups of heads that are projected to `out_rank` numbers each before they are mixed."""
    out_rank: int

    def entry_size(self, layer: int) -> int:
        """Return the numbers of an entry, with its index key behind it if queries choose."""
        if not self.rates[layer]:
            return 0
        return self.head_dim + (self.index.head_dim if self.chooses[layer] else 0)

    def state_rows(self, layer: int) -> int:
        """Return the vectors, each as long as an entry, of a sequence's state in a layer (`models/layers/entries.py`)."""
        if not self.rates[layer]:
            return 0
        return 7 if self.chooses[layer] else 3

    def num_weights(self, layer: int, hidden: int, num_heads: int, heads: int) -> int:
        """Return the weights of a layer's attention, of whose `num_heads` a rank has `heads`. The rest is whole on each."""
        dim, size = self.head_dim, self.entry_size(layer)
        shared = hidden * (self.q_rank + dim + 2 * size * (1 + self.chooses[layer]))
        if self.chooses[layer]:
            shared += self.index.num_heads * (self.q_rank * self.index.head_dim + hidden)
        mixed = self.out_groups * self.out_rank * heads // num_heads
        return shared + heads * dim * (self.q_rank + self.out_rank) + mixed * hidden

    @property
    def room(self) -> int:
        """The numbers behind a token's own for a piece of an entry."""
        pieces = [-(-self.entry_size(layer) // rate) for layer, rate in enumerate(self.rates) if rate]
        return -(-max(pieces, default=0) // 2) * 2

    def num_slots(self, layer: int, slot_bytes: int) -> int:
        """Return how many slots a sequence's state takes in a layer."""
        return -(-self.state_rows(layer) * self.entry_size(layer) * FLOAT_BYTES // slot_bytes)

    def layout(self, block_size: int, dtype: str) -> KVLayout:
        size, num_layers = self.head_dim + self.room, len(self.rates)
        slot_bytes = size * DTYPE_BYTES[dtype]
        most = max(self.num_slots(layer, slot_bytes) for layer in range(num_layers))
        return KVLayout(
            num_layers=num_layers,
            num_kv_heads=1,
            head_dim=size,
            block_size=block_size,
            dtype=dtype,
            state="mla",
            state_blocks=num_blocks_for(most, block_size),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamsSpec:
    """The residual as several streams that each layer mixes (Xie et al., "mHC", 2025)."""

    num_streams: int
    num_iterations: int
    """How often rows and columns of a layer's mixing matrix are made to sum to one."""
    eps: float

    def num_weights(self, hidden: int) -> int:
        """Return the weights of a layer's mixing, before and behind both of its halves."""
        return 2 * self.num_streams * (2 + self.num_streams) * self.num_streams * hidden
