"""How many layers of each kind a model has."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerCounts:
    layers: int
    growing: int
    """Layers whose state grows with the context."""
    recurrent: int
    """Layers with a state of fixed size."""
    dense: int
    """Layers with a feed-forward block that every token passes whole."""
    sparse: int
    """Layers with experts."""


def half_layers(config: Mapping[str, Any]) -> LayerCounts | None:
    """Return the counts of a model whose layers are one of these each (Nemotron-H); None for others. Raises KeyError."""
    if config.get("model_type") != "nemotron_h":
        return None
    names = config.get("layers_block_type") or config["hybrid_override_pattern"]
    counts = Counter(names)
    return LayerCounts(
        layers=len(names),
        growing=counts["full_attention"] + counts["attention"] + counts["*"],
        recurrent=counts["linear_attention"] + counts["mamba"] + counts["M"],
        dense=counts["mlp"] + counts["-"],
        sparse=counts["moe"] + counts["E"],
    )
