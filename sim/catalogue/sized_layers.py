"""What the layers of Gemma 4 weigh and keep, which differ in their heads, in their dense blocks, and in whose keys and values
they read."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from models.families.gemma4 import DEFAULTS, gemma4

_ARCHITECTURE = "Gemma4ForCausalLM"


@dataclass(frozen=True, slots=True)
class SizedLayers:
    num_weights: int
    """Attention, dense blocks and what makes the layers' own inputs, of all layers."""
    table_weights: int
    """The table of the layers' own inputs."""
    kv_values: int
    """Values kept for a token."""
    pair_values: int
    """Products of a query with one key and value."""


def sized_layers(config: Mapping[str, Any]) -> SizedLayers | None:
    """Return them; None for another family. Raises UnsupportedModel."""
    if not str(config.get("model_type")).startswith("gemma4"):
        return None
    no_inputs = {"hidden_size_per_layer_input": config.get("hidden_size_per_layer_input") or 0}
    spec = gemma4({**DEFAULTS[_ARCHITECTURE], **config, **no_inputs, "architectures": [_ARCHITECTURE]})
    assert spec.kv is not None
    layout, hidden, layers = spec.kv_layout(1, "bfloat16"), spec.hidden_size, range(spec.num_layers)
    queries = [spec.num_heads * spec.heads_of(layer).head_dim for layer in layers]
    made = [sum(spec.kv.projections(layer, spec.num_heads).values()) for layer in layers]
    dense = [3 * spec.mlp_size(layer) for layer in layers]
    weights, table = hidden * (sum(queries) + sum(made) + sum(dense)), 0
    if (inputs := spec.layer_inputs) is not None:
        weights += 3 * hidden * inputs.size * spec.num_layers
        table = inputs.vocab_size * inputs.size * spec.num_layers
    kept = layout.num_layers * layout.num_planes * layout.num_kv_heads * layout.head_dim
    return SizedLayers(weights, table, kept, 2 * sum(queries))
