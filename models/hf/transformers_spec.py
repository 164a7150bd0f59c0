"""Describes a model whose layers transformers computes: an architecture that Baton has no code for.

What a configuration cannot tell (attention that is not asked for through transformers' interface, weights that are missing) is
refused as the model is built: see models/hf/transformers_model.py."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from models.hf.tp_plan import problem
from models.hf.transformers_config import refused, transformers_config
from models.spec.config_fields import LAYER_TYPES, scaled_context, stored_dtype
from models.spec.expert_share import expert_share
from models.spec.foreign_cache import ForeignCache
from models.spec.model_spec import ModelSpec, RopeSpec
from models.spec.quantisation_config import read_quantisation

if TYPE_CHECKING:
    from models.hf.cache_probe import LayersKeep

_CONTEXT_NAMES: Final = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length", "n_ctx")
_LENGTH_DEPENDENT = ("longrope", "dynamic")
"""Kinds of rotation in which every position changes once a sequence is longer than the model was first made for."""

_LONGEST: Final = 1 << 17
"""The context of a model whose configuration names none, since its layers count no positions."""
_PACKED: Final = LAYER_TYPES | {"conv", "hybrid", "hybrid_sliding", "linear_attention", "mamba", "mlp", "moe"}
"""Types of layers that attend to all tokens before their own, or to the last of them, or keep a state, or nothing."""
_STATES: Final = "it keeps recurrent states, which its ranks cannot share"
_WHOLE: Final = "its layers' keys and values differ in shape, so that its ranks cannot share their heads"


def transformers_spec(folder: Path, config: Mapping[str, Any], architecture: str) -> ModelSpec:
    """Return the description. Raises UnsupportedModel by name."""
    if (how := read_quantisation(config)) is not None and how.kind == "gguf":
        raise refused(
            architecture,
            "Baton reads GGUF files of its own architectures alone: use a folder with safetensors",
        )
    found = _text_config(folder, config, architecture)
    num_layers = number(architecture, found, "num_hidden_layers")
    kept = _kept(folder, architecture, found, num_layers)
    num_heads = _largest(found, "num_attention_heads", 1)
    hidden_size = number(architecture, found, "hidden_size")
    num_kv_heads, head_dim = kept.heads or (1, _largest(found, "head_dim", hidden_size // num_heads))
    if kept.cache is not None and not kept.cache.is_whole:
        num_kv_heads, head_dim = kept.cache.num_kv_heads, kept.cache.head_dim
    return ModelSpec(
        architecture=architecture,
        vocab_size=number(architecture, found, "vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=_largest(found, "intermediate_size", 4 * hidden_size),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        norm_eps=0.0,
        max_context_tokens=_context(found),
        rope=RopeSpec("default", 0.0),
        tied=bool(getattr(found, "tie_word_embeddings", False)),
        dtype=stored_dtype(config),
        windows=(0,) * num_layers,
        cache=kept.cache,
        num_weights=kept.num_weights,
        implementation="transformers",
        stages=() if kept.cache else _stages(getattr(found, "base_model_pp_plan", None) or {}),
        uncut=_uncut(kept.cache, found),
        foreign_expert_share=expert_share(lambda name: getattr(found, name, None)),
    )


def _uncut(cache: ForeignCache | None, config: Any) -> str:
    """Return `ModelSpec.uncut`."""
    if cache is not None and cache.state_bytes:
        return _STATES
    if cache is not None and cache.is_whole:
        return _WHOLE
    return problem(getattr(config, "base_model_tp_plan", None) or {})


def _kept(folder: Path, architecture: str, found: Any, num_layers: int) -> "LayersKeep":
    """Return what the layers keep. Raises UnsupportedModel."""
    from models.hf.cache_probe import kept_by  # noqa: PLC0415 (seconds, as in models.hf.transformers_config)

    written = (folder / "config.json").read_text()
    kept = kept_by(folder, written, architecture, num_layers, packs=_packs(found))
    if kept.heads is None and kept.cache is None:
        raise refused(architecture, kept.why)
    return kept


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
        MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    )

    seeing = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES.values()
    if architecture not in (*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values(), *seeing):
        own = "auto_map" in config
        why = (
            "its code is in its own repository, which Baton does not run"
            if own
            else "transformers has no causal language model of that name"
        )
        raise refused(architecture, why)
    return transformers_config(folder, architecture, text_alone=True)


def _packs(config: Any) -> bool:
    """Return whether tokens of several sequences may be in one row: whether all layers attend from each token to those before
    it, or to the last of them."""
    kinds = set(getattr(config, "layer_types", None) or ())
    return kinds <= _PACKED and not getattr(config, "attention_chunk_size", None)


def _largest(config: Any, name: str, default: int) -> int:
    """Return a number of transformers' configuration, or the largest where it has one of each layer."""
    try:
        value = getattr(config, name, None)
    except RuntimeError:  # transformers' word for a size that layers differ in
        value = None
    counts = [one for one in (value if isinstance(value, list) else [value]) if isinstance(one, int)]
    return max(counts, default=0) or default


def _context(config: Any) -> int:
    """Return the number of tokens up to which positions mean the same in any batch."""
    rope = getattr(config, "rope_parameters", None) or {}
    named = [_largest(config, name, 0) for name in _CONTEXT_NAMES]
    longest = scaled_context(next(filter(None, named), _LONGEST), rope)
    kinds = [rope, *(part for part in rope.values() if isinstance(part, dict))]
    for part in kinds:
        if part.get("rope_type") in _LENGTH_DEPENDENT:
            first = part.get("original_max_position_embeddings") or getattr(
                config, "original_max_position_embeddings", None
            )
            longest = min(longest, int(first or longest))
    return longest
