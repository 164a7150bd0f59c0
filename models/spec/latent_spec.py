"""What the cache of latent attention keeps of a token, and how queries choose among tokens."""

import math
from dataclasses import dataclass

_SCALE_GROUP = 128
"""The numbers of a latent that share a scale in DeepSeek's own kernels for caches of FP8, which keep the rotated part of keys
in bfloat16 as well."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenIndexSpec:
    """How queries choose the tokens that they attend to (DeepSeek-AI, "DeepSeek-V3.2", 2025, arXiv:2512.02556)."""

    num_heads: int
    head_dim: int
    """Dimensions of each index query, and of a token's index key. The first `MlaSpec.rope_dim` are rotated."""
    top_k: int
    """How many tokens a query attends to, where it sees more."""
    interleaved: bool
    """Rotated pairs are neighbours in the checkpoint. Those of attention itself may lie otherwise."""
    chooses: tuple[bool, ...]
    """Whether each layer chooses tokens itself. Others attend to those of the last layer that does."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MlaSpec:
    q_rank: int
    """0: queries are made from the hidden state at once."""
    kv_rank: int
    nope_dim: int
    """Dimensions of each head's query and key that are not rotated; `rope_dim` follows."""
    rope_dim: int
    value_dim: int
    interleaved: bool
    """Rotated pairs are neighbours in the checkpoint."""
    index: TokenIndexSpec | None = None
    """None where queries attend to all tokens before them."""

    @property
    def latent_size(self) -> int:
        """Numbers of a token's latent with the rotated part of its key."""
        return self.kv_rank + self.rope_dim

    @property
    def token_size(self) -> int:
        """Numbers that the cache keeps of a token in each layer: the latent, and the index key behind it."""
        return self.latent_size + (0 if self.index is None else self.index.head_dim)

    @property
    def scale_group(self) -> int:
        """Neighbouring numbers that share a scale in a cache of 8 bits."""
        return math.gcd(self.kv_rank, 0 if self.index is None else self.index.head_dim, _SCALE_GROUP)
