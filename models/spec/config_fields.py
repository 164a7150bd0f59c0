"""Reads what all families say alike in config.json."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from core.errors import UnsupportedModel
from models.spec.model_spec import Activation, ModelSpec, RopeSpec, rope_spec

Config = Mapping[str, Any]
LAYER_TYPES = {"full_attention", "sliding_attention"}
"""The layer types of `layer_types` in which a layer keeps keys and values, and nothing else."""


def common(config: Config, activation_key: str = "hidden_act") -> ModelSpec:
    """Return a dense model without biases or windows. Raises UnsupportedModel, and KeyError for what is missing."""
    num_heads = count(config, "num_attention_heads")
    num_layers = count(config, "num_hidden_layers")
    rope = rope_spec(config)
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
        max_context_tokens=scaled_context(
            count(config, "max_position_embeddings"), {**rope.parameters, "rope_type": rope.kind}
        ),
        rope=rope,
        tied=bool(config.get("tie_word_embeddings", False)),
        dtype=stored_dtype(config),
        activation=activation(config.get(activation_key, "silu")),
        windows=(0,) * num_layers,
    )


def scaled_context(longest: int, rope: Mapping[str, Any]) -> int:
    """Return the context of a model whose `max_position_embeddings` is `longest`, with the scaling of its rotary embeddings.

    Model cards ask users to add YaRN or linear scaling without raising that number. Some configs have raised it already."""
    if rope.get("rope_type") not in ("linear", "yarn"):
        return longest
    original = rope.get("original_max_position_embeddings") or longest
    return max(longest, int(original * float(rope.get("factor") or 1.0)))


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


def factor(config: Config, key: str) -> float:
    """Return a factor, 1 where the config has none."""
    value = config.get(key)
    if value is None:
        return 1.0
    if not isinstance(value, int | float) or value <= 0:
        raise UnsupportedModel(f"{key} is {value!r} in config.json; it must be a positive number")
    return float(value)


def multipliers(config: Config) -> dict[str, float]:
    """Return the fields of `ModelSpec` that hold Granite's factors."""
    return {
        "embedding_scale": factor(config, "embedding_multiplier"),
        "query_scale": factor(config, "attention_multiplier"),
        "residual_scale": factor(config, "residual_multiplier"),
        "logit_divisor": factor(config, "logits_scaling"),
    }


def text_part(
    config: Config, family: Callable[[Config], ModelSpec], defaults: Config, *others: str
) -> ModelSpec:
    """Return the decoder of a model that also sees, for text alone. `defaults` are the decoder's, and `others` the beginnings of
    the names of what sees."""
    text = config["text_config"]
    if not isinstance(text, dict):
        raise UnsupportedModel(f"text_config is {text!r} in config.json; it must be an object")
    spec = family({**defaults, **config, **text, "architectures": config["architectures"]})
    parts = (*others, "multi_modal_projector.")
    return replace(spec, skipped_prefixes=(*parts, *(f"model.{part}" for part in parts)))


def mtp_layers(config: Config) -> tuple[str, ...]:
    """Return `ModelSpec.mtp_layers` of a model that has them behind its own layers."""
    first = count(config, "num_hidden_layers")
    return tuple(
        f"model.layers.{first + more}." for more in range(int(config["num_nextn_predict_layers"] or 0))
    )


def windows(config: Config, slides: Callable[[int], bool]) -> tuple[int, ...]:
    """Return each layer's window, from `layer_types` where the config has them."""
    window = int(config.get("sliding_window") or 0)
    return tuple(window if sliding else 0 for sliding in sliding_layers(config, slides))


def sliding_layers(config: Config, slides: Callable[[int], bool]) -> tuple[bool, ...]:
    """Return whether each layer has a window, by `layer_types` where the config has them, else by `slides`."""
    kinds = config.get("layer_types")
    if kinds and (unknown := set(kinds) - LAYER_TYPES):
        raise UnsupportedModel(
            f"layer type {sorted(unknown)[0]!r} is not supported (full_attention and sliding_attention are)"
        )
    if kinds:
        return tuple(kind == "sliding_attention" for kind in kinds)
    return tuple(slides(layer) for layer in range(count(config, "num_hidden_layers")))


def rotating_layers(config: Config) -> tuple[bool, ...]:
    """Return which layers rotate. The config's list of those without positions has a 1 for each that rotates."""
    given, num_layers = config.get("no_rope_layers"), count(config, "num_hidden_layers")
    if given:
        if len(given) != num_layers:
            raise UnsupportedModel(
                f"no_rope_layers has {len(given)} entries for {num_layers} num_hidden_layers"
            )
        return tuple(map(bool, given))
    interval = count(config, "no_rope_layer_interval")
    return tuple(bool((layer + 1) % interval) for layer in range(num_layers))


def ropes_where(rope: RopeSpec, rotates: Sequence[int]) -> tuple[RopeSpec, ...]:
    """Return each layer's rotation, which is none where `rotates` is false or 0."""
    return tuple(rope if turned else replace(rope, kind="none") for turned in rotates)


def partly_rotated(config: Config, default: float) -> ModelSpec:
    """Return `common` of a model that may rotate just the leading part of each head."""
    rope = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    said = rope.pop("partial_rotary_factor", config.get("partial_rotary_factor"))
    plain = {"rope_parameters": rope, "rope_scaling": None, "partial_rotary_factor": 1.0}
    spec = common({**config, **plain})
    rotated = int(spec.head_dim * (default if said is None else float(said)))
    if not 2 <= rotated <= spec.head_dim:
        raise UnsupportedModel(
            f"partial_rotary_factor {said} rotates {rotated} of {spec.head_dim} dimensions"
        )
    return replace(spec, rotary_dim=rotated)


def with_two_ropes(
    config: Config, slides: Callable[[int], bool], local_theta: float, activation_key: str = "hidden_act"
) -> ModelSpec:
    """Return `common` with windows, in which layers with a window rotate by a base of their own and without scaling: as
    `rope_parameters` say by layer type (transformers 5), or `rope_theta` and `rope_scaling` of the other layers and
    `local_theta` (before)."""
    given = config.get("rope_parameters") or {}
    if given and not set(given) <= LAYER_TYPES:
        raise UnsupportedModel("rope_parameters are not given by layer type")
    plain = {**config, "rope_parameters": None, "rope_scaling": None}
    local = {**plain, "rope_theta": local_theta, "rope_parameters": given.get("sliding_attention")}
    full = {**plain, "rope_parameters": given.get("full_attention") or config.get("rope_scaling")}
    within, everywhere = rope_spec(local), rope_spec(full)
    return replace(
        common(plain, activation_key),
        rope=everywhere,
        layer_ropes=tuple(within if sliding else everywhere for sliding in sliding_layers(config, slides)),
        windows=windows(config, slides),
    )
