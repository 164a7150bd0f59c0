"""What a model has in place of attention to all tokens whose older ones are summed up in entries (DeepSeek-V4)."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from kernels.states import FLOAT_BYTES
from models.families.deepseek_v4 import DEFAULTS, deepseek_v4
from sim.catalogue.catalogue import CatalogueModel

_NAME = "DeepseekV4ForCausalLM"
_FP4_BYTES = 0.5 + 1 / 32
"""Bytes of a weight of four bits, with one for each 32."""


def has_entries(config: Mapping[str, Any]) -> bool:
    return config.get("model_type") == "deepseek_v4"


def with_entries(model: CatalogueModel, config: Mapping[str, Any], value_bytes: float) -> CatalogueModel:
    """Return the model with attention, where it has entries. A query attends to its window and to as many entries as it chooses;
    all others are counted as keys of an index, which are read and scored. `value_bytes`: of a layer's weight."""
    if not has_entries(config):
        return model
    spec = deepseek_v4({**DEFAULTS[_NAME], **config, "architectures": [_NAME]})
    kept, heads = spec.compressed, spec.num_heads
    assert kept is not None
    weights = sum(kept.num_weights(layer, spec.hidden_size, heads, heads) for layer in range(spec.num_layers))
    weights += 0 if spec.streams is None else spec.streams.num_weights(spec.hidden_size) * spec.num_layers
    scored = [
        kept.index.head_dim / rate if chooses else kept.head_dim / rate
        for rate, chooses in zip(kept.rates, kept.chooses, strict=True)
        if rate
    ]
    pairs = [
        (kept.index.num_heads * kept.index.head_dim if chooses else 2 * heads * kept.head_dim) / rate
        for rate, chooses in zip(kept.rates, kept.chooses, strict=True)
        if rate
    ]
    states = [kept.state_rows(layer) * kept.entry_size(layer) for layer in range(spec.num_layers)]
    is_halved = config.get("expert_dtype") == "fp4"
    return replace(
        model,
        num_weights=model.num_weights + weights,
        weight_bytes=model.weight_bytes + weights * value_bytes,
        expert_weight_bytes=model.num_expert_weights * _FP4_BYTES if is_halved else model.expert_weight_bytes,
        kv_token_values=spec.num_layers * (kept.head_dim + kept.room),
        pair_values=spec.num_layers * 2 * heads * kept.head_dim,
        chosen_tokens=kept.window + kept.index.top_k * any(kept.chooses),
        chosen_values=spec.num_layers * kept.head_dim,
        index_values=int(sum(scored)),
        index_pair_values=int(sum(pairs)),
        state_bytes=sum(states) * FLOAT_BYTES,
    )
