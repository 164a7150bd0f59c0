"""Which heads of a pool's layer a model layer has whose heads are wider than the pool's, or fewer (`kernels/kv_parts.py`)."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class HeadPlaces:
    first: int
    step: int
    """From the beginning of one of the layer's heads to that of the next, in heads of the pool."""
    width: int
    """Neighbouring heads of the pool that hold a head of the layer, a piece of it each."""
