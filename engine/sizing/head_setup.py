"""What a rank must know to load its part of a head that proposes. It goes to ranks in other processes, too."""

from dataclasses import dataclass
from typing import Literal

from core.kv import KVShard

HeadKind = Literal["mtp", "eagle"]
"""The model's layer for multi-token prediction, or an EAGLE-3 head."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadSetup:
    kind: str
    """A `HeadKind`."""
    folder: str
    weights: str
    """A WeightFormat."""
    shard: KVShard
    """What a pool beside the rank's own keeps."""
    taps: tuple[int, ...] = ()
    """The model's layers before which the head reads the state."""
