"""What the drawing of tokens is asked for: shapes of distributions, one number for each row, penalties."""

from dataclasses import dataclass
from typing import Protocol

import numpy as np


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


@dataclass(frozen=True, slots=True)
class Draw:
    """One row's, of temperature > 0."""

    shape: Shape
    uniform: float
    """In [0, 1)."""


@dataclass(frozen=True, slots=True)
class Penalties:
    """In host memory: implementations upload it."""

    entries: np.ndarray
    """(3, E) int64: rows; tokens of their histories, each pair once; how often each is in the row's output."""
    factors: np.ndarray
    """(3, N) float32: each row's repetition, presence and frequency penalty."""
