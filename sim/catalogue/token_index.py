"""What a model adds whose queries choose the tokens that they attend to: an index key of each token, and the scoring of all."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from models.families.deepseek_v32 import choosing_layers
from sim.catalogue.catalogue import CatalogueModel


def with_token_index(model: CatalogueModel, config: Mapping[str, Any], value_bytes: float) -> CatalogueModel:
    """Return the model with its index, where `config` names one. `value_bytes` are those of a layer's weight. Raises KeyError for
    a size that is not there, UnsupportedModel for a kind of layer that is unknown."""
    top_k = config.get("index_topk")
    if not top_k or not config.get("kv_lora_rank"):
        return model
    heads, size, layers = config["index_n_heads"], config["index_head_dim"], model.num_layers
    choosing = sum(choosing_layers(config))
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
