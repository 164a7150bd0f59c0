"""What a model adds whose queries choose the tokens that they attend to: an index key of each token, and the scoring of all."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from sim.catalogue import CatalogueModel


def with_token_index(model: CatalogueModel, config: Mapping[str, Any], value_bytes: float) -> CatalogueModel:
    """Return the model with its index, where `config` names one. `value_bytes` are those of a layer's weight. Raises KeyError for
    a size that is not there."""
    top_k = config.get("index_topk")
    if not top_k or not config.get("kv_lora_rank"):
        return model
    heads, size, layers = config["index_n_heads"], config["index_head_dim"], model.num_layers
    choosing = _num_choosing(config, layers)
    weights = choosing * (config["q_lora_rank"] * heads * size + model.hidden_size * (size + heads))
    return replace(
        model,
        num_weights=model.num_weights + weights,
        weight_bytes=model.weight_bytes + weights * value_bytes,
        # A layer that shares the choice of another leaves the room of its index keys unused.
        kv_token_values=model.kv_token_values + layers * size,
        chosen_tokens=top_k,
        chosen_values=model.kv_token_values,
        index_values=choosing * size,
        index_pair_values=choosing * heads * size,
    )


def _num_choosing(config: Mapping[str, Any], num_layers: int) -> int:
    """Return the number of layers that choose tokens themselves."""
    kinds = config.get("indexer_types") or config.get("index_topk_pattern")
    if kinds:
        return sum(kind in {"full", "F"} for kind in kinds)
    every, offset = max(1, config.get("index_topk_freq") or 1), config.get("index_skip_topk_offset", 2)
    return sum(max(layer - offset + 1, 0) % every == 0 for layer in range(num_layers))
