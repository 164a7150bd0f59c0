"""Cohere's models: both halves of a layer take the same, behind one norm that takes the mean off."""

from dataclasses import replace
from typing import Any

from core.errors import UnsupportedModel
from models.spec.config_fields import Config, common, factor, ropes_where, windows
from models.spec.model_spec import LayerNorms, ModelSpec

_COHERE: dict[str, Any] = {"layer_norm_eps": 1e-5, "logit_scale": 0.0625, "tie_word_embeddings": True}
DEFAULTS: dict[str, dict[str, Any]] = {
    "CohereForCausalLM": _COHERE,
    "Cohere2ForCausalLM": {**_COHERE, "sliding_window": 4096, "sliding_window_pattern": 4},
}
"""As in `models.families.dense`."""


def cohere(config: Config) -> ModelSpec:
    if config.get("use_qk_norm"):
        raise UnsupportedModel("use_qk_norm is not supported in this family: those norms take the mean off")
    bias = bool(config.get("attention_bias", False))
    return replace(
        common({**config, "rms_norm_eps": config["layer_norm_eps"]}),
        norms=LayerNorms(before_mlp=""),
        one_norm=True,
        centred=True,
        rotates_neighbours=True,
        qkv_bias=bias,
        out_bias=bias,
        logit_divisor=1.0 / factor(config, "logit_scale"),
    )


def cohere2(config: Config) -> ModelSpec:
    """Return the model, in which layers without a window rotate nothing."""
    spec, every = cohere(config), int(config["sliding_window_pattern"])
    spans = windows(config, lambda layer: bool((layer + 1) % every))
    return replace(spec, layer_ropes=ropes_where(spec.rope, spans), windows=spans)
