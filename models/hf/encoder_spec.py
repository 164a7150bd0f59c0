"""Which checkpoints are encoders, and their description: models that read a text in both directions and generate nothing.

transformers computes their layers (models/hf/encoder_model.py). A text passes them in one piece, and nothing of it is kept."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from models.hf.transformers_config import refused, transformers_config
from models.hf.transformers_spec import number
from models.pooling.scoring import ENCODER_HEADS, SCORER, is_scorer
from models.spec.config_fields import stored_dtype
from models.spec.model_spec import ModelSpec, RopeSpec

_COUNTS_FROM_PADDING = frozenset({"camembert", "mpnet", "roberta", "xlm-roberta"})
"""Positions begin behind the padding token's id."""
_ENCODERS = _COUNTS_FROM_PADDING | {
    "albert", "bert", "deberta-v2", "distilbert", "electra", "eurobert", "modernbert"
}  # fmt: skip
_SAVED_AS = ("Model", "ForMaskedLM", "ForPreTraining", SCORER)


def is_encoder(config: Mapping[str, Any]) -> bool:
    """Whether config.json describes an encoder."""
    return config.get("model_type") in _ENCODERS and not config.get("is_decoder")


def encoder_spec(folder: Path, config: Mapping[str, Any], architecture: str) -> ModelSpec:
    """Raises UnsupportedModel by name."""
    if not architecture.endswith(_SAVED_AS):
        raise refused(architecture, f"encoders are served that were saved as {', '.join(_SAVED_AS)}")
    if is_scorer(config) and config["model_type"] not in ENCODER_HEADS:
        raise refused(architecture, f"encoders that score are {', '.join(ENCODER_HEADS)}")
    if config.get("quantization_config"):
        raise refused(
            architecture, "its weights are quantised, which Baton reads of its own architectures alone"
        )
    found = transformers_config(folder, architecture)
    num_heads = number(architecture, found, "num_attention_heads")
    hidden_size = number(architecture, found, "hidden_size")
    num_layers = number(architecture, found, "num_hidden_layers")
    positions = number(architecture, found, "max_position_embeddings")
    return ModelSpec(
        architecture=architecture,
        vocab_size=number(architecture, found, "vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=number(architecture, found, "intermediate_size", 4 * hidden_size),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_heads,
        head_dim=hidden_size // num_heads,
        norm_eps=0.0,
        max_context_tokens=positions - first_position(found),
        rope=RopeSpec("default", 0.0),
        tied=True,
        dtype=stored_dtype(config),
        windows=(0,) * num_layers,
        implementation="transformers",
        encodes=True,
    )


def first_position(config: Any) -> int:
    """What a text's first token has for a position, by transformers' configuration."""
    return config.pad_token_id + 1 if config.model_type in _COUNTS_FROM_PADDING else 0
