"""Reads what all families say alike in config.json."""

from collections.abc import Callable, Mapping
from typing import Any

from core.errors import UnsupportedModel
from models.spec import Activation, ModelSpec, rope_spec

Config = Mapping[str, Any]
LAYER_TYPES = {"full_attention", "sliding_attention"}
"""The layer types of `layer_types` in which a layer keeps keys and values, and nothing else."""


def common(config: Config, activation_key: str = "hidden_act") -> ModelSpec:
    """Return a dense model without biases or windows. Raises UnsupportedModel, and KeyError for what is missing."""
    num_heads = count(config, "num_attention_heads")
    num_layers = count(config, "num_hidden_layers")
    return ModelSpec(
        architecture=config["architectures"][0],
        vocab_size=count(config, "vocab_size"),
        hidden_size=count(config, "hidden_size"),
        intermediate_size=count(config, "intermediate_size"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_heads
        if config.get("num_key_value_heads") is None
        else count(config, "num_key_value_heads"),
        head_dim=count(config, "hidden_size") // num_heads
        if config.get("head_dim") is None
        else count(config, "head_dim"),
        norm_eps=float(config["rms_norm_eps"]),
        max_context_tokens=count(config, "max_position_embeddings"),
        rope=rope_spec(config),
        tied=bool(config.get("tie_word_embeddings", False)),
        dtype=stored_dtype(config),
        activation=activation(config.get(activation_key, "silu")),
        windows=(0,) * num_layers,
    )


def stored_dtype(config: Config) -> str:
    """Return the checkpoint's dtype. Transformers 5 has another name for it than earlier ones."""
    return str(config.get("dtype") or config.get("torch_dtype") or "float32")


def count(config: Config, key: str) -> int:
    value = config[key]
    if not isinstance(value, int) or value < 1:
        raise UnsupportedModel(f"{key} is {value!r} in config.json; it must be a positive whole number")
    return value


def activation(name: str) -> Activation:
    if name == "silu":
        return "silu"
    if name == "gelu_pytorch_tanh":
        return "gelu_tanh"
    raise UnsupportedModel(f"activation {name!r} is not supported (silu and gelu_pytorch_tanh are)")


def windows(config: Config, slides: Callable[[int], bool]) -> tuple[int, ...]:
    """Return each layer's window, from `layer_types` where the config has them."""
    num_layers, window = count(config, "num_hidden_layers"), int(config.get("sliding_window") or 0)
    kinds = config.get("layer_types")
    if kinds and (unknown := set(kinds) - LAYER_TYPES):
        raise UnsupportedModel(
            f"layer type {sorted(unknown)[0]!r} is not supported (full_attention and sliding_attention are)"
        )
    if kinds:
        return tuple(window if kind == "sliding_attention" else 0 for kind in kinds)
    return tuple(window if slides(layer) else 0 for layer in range(num_layers))
