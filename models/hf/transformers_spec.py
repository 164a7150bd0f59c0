"""Describes a model whose layers transformers computes: an architecture that Baton has no code for.

What a configuration cannot tell (attention that is not asked for through transformers' interface, weights that are missing) is
refused as the model is built: see models/hf/transformers_model.py."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from models.hf.tp_plan import problem
from models.hf.transformers_config import refused, transformers_config
from models.spec.config_fields import LAYER_TYPES, scaled_context, stored_dtype
from models.spec.expert_share import expert_share
from models.spec.model_spec import ModelSpec, RopeSpec

_LENGTH_DEPENDENT = ("longrope", "dynamic")
"""Kinds of rotation in which every position changes once a sequence is longer than the model was first made for."""


def transformers_spec(folder: Path, config: Mapping[str, Any], architecture: str) -> ModelSpec:
    """Return the description. Raises UnsupportedModel by name."""
    if config.get("quantization_config"):
        raise refused(
            architecture, "its weights are quantised, which Baton reads of its own architectures alone"
        )
    found = _text_config(folder, config, architecture)
    _check_layers(architecture, found)
    num_heads = number(architecture, found, "num_attention_heads")
    hidden_size = number(architecture, found, "hidden_size")
    num_kv_heads = number(architecture, found, "num_key_value_heads", num_heads)
    head_dim = number(architecture, found, "head_dim", hidden_size // num_heads)
    if getattr(found, "kv_lora_rank", None):
        # Latents are expanded before transformers asks for attention: a key and a value for each head.
        num_kv_heads = num_heads
        head_dim = number(architecture, found, "qk_nope_head_dim") + number(
            architecture, found, "qk_rope_head_dim"
        )
    elif number(architecture, found, "v_head_dim", head_dim) != head_dim:
        raise refused(
            architecture, f"values have {found.v_head_dim} dimensions a head, keys {head_dim} (v_head_dim)"
        )
    return ModelSpec(
        architecture=architecture,
        vocab_size=number(architecture, found, "vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=number(architecture, found, "intermediate_size", 4 * hidden_size),
        num_layers=number(architecture, found, "num_hidden_layers"),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        norm_eps=0.0,
        max_context_tokens=_context(architecture, found),
        rope=RopeSpec("default", 0.0),
        tied=bool(getattr(found, "tie_word_embeddings", False)),
        dtype=stored_dtype(config),
        windows=(0,) * number(architecture, found, "num_hidden_layers"),
        implementation="transformers",
        stages=_stages(getattr(found, "base_model_pp_plan", None) or {}),
        uncut=problem(getattr(found, "base_model_tp_plan", None) or {}),
        foreign_expert_share=expert_share(lambda name: getattr(found, name, None)),
    )


def _stages(plan: Mapping[str, Any]) -> tuple[str, ...]:
    return tuple(plan) if "layers" in plan else ()


def number(architecture: str, config: Any, name: str, default: int | None = None) -> int:
    """Return a whole number of transformers' configuration. Raises UnsupportedModel where it is none."""
    try:
        value = getattr(config, name, default)
    except RuntimeError:  # transformers' word for a size that layers differ in
        value = "of each layer's own"
    if value is None:
        value = default
    if isinstance(value, bool) or not isinstance(value, int):
        raise refused(architecture, f"its configuration says {name} {value!r}, where a number is needed")
    return value


def _text_config(folder: Path, config: Mapping[str, Any], architecture: str) -> Any:
    from transformers.models.auto.modeling_auto import (  # noqa: PLC0415 (seconds, as in models.hf.transformers_config)
        MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    )

    if architecture not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values():
        own = "auto_map" in config
        why = (
            "its code is in its own repository, which Baton does not run"
            if own
            else "transformers has no causal language model of that name"
        )
        raise refused(architecture, why)
    return transformers_config(folder, architecture, text_alone=True)


def _check_layers(architecture: str, config: Any) -> None:
    """Check that the layers attend from each token to those before it, and keep nothing else of a sequence."""
    if getattr(config, "is_encoder_decoder", False):
        raise refused(architecture, "it attends to another model's tokens")
    kinds = set(getattr(config, "layer_types", None) or ())
    if unknown := sorted(kinds - LAYER_TYPES):
        raise refused(
            architecture, f"layers of type {', '.join(unknown)} keep something else than keys and values"
        )
    if getattr(config, "attention_chunk_size", None):
        raise refused(architecture, "it attends in chunks (attention_chunk_size)")
    if getattr(config, "num_kv_shared_layers", 0):
        raise refused(architecture, "layers share keys and values (num_kv_shared_layers)")


def _context(architecture: str, config: Any) -> int:
    """Return the number of tokens up to which positions mean the same in any batch."""
    rope = getattr(config, "rope_parameters", None) or {}
    longest = scaled_context(number(architecture, config, "max_position_embeddings"), rope)
    kinds = [rope, *(part for part in rope.values() if isinstance(part, dict))]
    for part in kinds:
        if part.get("rope_type") in _LENGTH_DEPENDENT:
            first = part.get("original_max_position_embeddings") or getattr(
                config, "original_max_position_embeddings", None
            )
            longest = min(longest, int(first or longest))
    return longest
