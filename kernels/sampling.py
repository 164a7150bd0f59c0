"""What the sampling of tokens is asked for: shapes of distributions, one number for each row, penalties."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from core.records import record


class Shape(Protocol):
    """The temperature of a row's distribution, and where it is cut."""

    @property
    def temperature(self) -> float: ...
    @property
    def top_k(self) -> int:
        """0: all tokens."""
        ...

    @property
    def top_p(self) -> float: ...
    @property
    def min_p(self) -> float: ...


@record()
class SampleShapes:
    """What rows ask of their samples. At temperature 0 the likeliest token is sampled, the first of equal ones."""

    shapes: Sequence[Shape]
    columns: Tensor
    """(5, N) float64, on the logits' device: what `shapes` say (temperature, top-k, top-p, min-p), and a number in [0, 1)."""

    @property
    def uniforms(self) -> Tensor:
        return self.columns[4]


@dataclass(frozen=True, slots=True)
class Masks:
    """What grammars allow. On the logits' device."""

    rows: Tensor
    """(R,) int64: the rows that have a mask, each once"""
    bits: Tensor
    """(R, W) int32 of at least V bits: a token may be sampled where its bit, token % 32 of word token // 32, is 1."""


@dataclass(frozen=True, slots=True)
class Penalties:
    """On the logits' device."""

    entries: Tensor
    """(3, E) int64: rows, or -1 where an entry means nothing; tokens of their histories, each pair once; how often each is in the
    row's output."""
    factors: Tensor
    """(3, N) float32: each row's repetition, presence and frequency penalty."""
