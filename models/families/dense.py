"""Families in which every token passes every weight."""

from dataclasses import replace
from typing import Any

from core.errors import UnsupportedModel
from models.spec.config_fields import (
    Config,
    common,
    count,
    multipliers,
    partly_rotated,
    ropes_where,
    rotating_layers,
    windows,
    with_two_ropes,
)
from models.spec.model_spec import LayerNorms, ModelSpec

DEFAULTS: dict[str, dict[str, Any]] = {
    "LlamaForCausalLM": {},
    "MistralForCausalLM": {"num_key_value_heads": 8, "sliding_window": 4096},
    "Qwen2ForCausalLM": {"num_key_value_heads": 32, "sliding_window": 4096, "max_window_layers": 28},
    "Qwen3ForCausalLM": {
        "num_key_value_heads": 32,
        "head_dim": 128,
        "sliding_window": 4096,
        "max_window_layers": 28,
    },
    "Gemma2ForCausalLM": {
        "num_key_value_heads": 4,
        "head_dim": 256,
        "sliding_window": 4096,
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": 256,
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
        "tie_word_embeddings": True,
    },
    "Gemma3ForCausalLM": {
        "vocab_size": 262_208,
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_hidden_layers": 26,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "max_position_embeddings": 131_072,
        "rms_norm_eps": 1e-6,
        "sliding_window": 4096,
        "sliding_window_pattern": 6,
        "rope_theta": 1e6,
        "rope_local_base_freq": 1e4,
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": 256,
        "tie_word_embeddings": True,
    },
    "GraniteForCausalLM": {},
    "Olmo2ForCausalLM": {},
    "Phi3ForCausalLM": {"original_max_position_embeddings": 4096, "rms_norm_eps": 1e-5},
    "Olmo3ForCausalLM": {"sliding_window": 4096, "rope_theta": 500_000.0},
    "SeedOssForCausalLM": {"num_key_value_heads": 8, "head_dim": 128, "attention_bias": True},
    "SmolLM3ForCausalLM": {
        "num_key_value_heads": 4,
        "no_rope_layer_interval": 4,
        "rope_theta": 2e6,
        "tie_word_embeddings": True,
    },
    "Exaone4ForCausalLM": {"num_key_value_heads": 32, "sliding_window": 4096, "sliding_window_pattern": 4},
    "Ernie4_5ForCausalLM": {
        "num_key_value_heads": 2,
        "head_dim": 128,
        "rope_theta": 500_000.0,
        "tie_word_embeddings": True,
    },
}
"""What a family means where its config.json lacks a key. That differs from what null means."""

SANDWICH = LayerNorms(
    after_attention="post_attention_layernorm",
    before_mlp="pre_feedforward_layernorm",
    after_mlp="post_feedforward_layernorm",
)
"""Gemma's norms before and behind each half of a layer."""
FUSED = ("gate_up_proj", "down_proj")
"""A dense block with gates and ups in one matrix."""
BEHIND = LayerNorms(
    before_attention="",
    after_attention="post_attention_layernorm",
    before_mlp="",
    after_mlp="post_feedforward_layernorm",
)
"""OLMo's, behind each half alone."""


def llama(config: Config) -> ModelSpec:
    bias = bool(config.get("attention_bias", False))
    return replace(common(config), qkv_bias=bias, out_bias=bias, mlp_bias=bool(config.get("mlp_bias", False)))


def seed_oss(config: Config) -> ModelSpec:
    return replace(llama(config), out_bias=bool(config.get("attention_out_bias", False)))


def smollm3(config: Config) -> ModelSpec:
    spec, rotates = llama(config), rotating_layers(config)
    window = int(config.get("sliding_window") or 0) if config.get("use_sliding_window") else 0
    return replace(
        spec,
        layer_ropes=ropes_where(spec.rope, rotates),
        windows=windows({**config, "sliding_window": window}, lambda layer: not rotates[layer]),
    )


def exaone4(config: Config) -> ModelSpec:
    """Return the model. Where some layers have windows the others rotate nothing."""
    spec, window, every = common(config), int(config["sliding_window"] or 0), config["sliding_window_pattern"]
    if not config.get("layer_types") and not isinstance(every, int):
        raise UnsupportedModel(
            f"sliding_window_pattern {every!r} is not supported without layer_types (a number is)"
        )
    spans = windows(config, lambda layer: bool((layer + 1) % every))
    return replace(
        spec,
        norms=BEHIND,
        qk_norm="head",
        layer_ropes=ropes_where(spec.rope, spans) if window else (),
        windows=spans,
    )


def ernie4_5(config: Config) -> ModelSpec:
    bias = bool(config.get("use_bias", False))
    return replace(common(config), rotates_neighbours=True, qkv_bias=bias, out_bias=bias, mlp_bias=bias)


def mistral(config: Config) -> ModelSpec:
    return replace(common(config), windows=windows(config, lambda _: bool(config.get("sliding_window"))))


def qwen2(config: Config) -> ModelSpec:
    return replace(common(config), qkv_bias=True, windows=qwen_windows(config))


def qwen3(config: Config) -> ModelSpec:
    bias = bool(config.get("attention_bias", False))
    return replace(common(config), qkv_bias=bias, out_bias=bias, qk_norm="head", windows=qwen_windows(config))


def gemma2(config: Config) -> ModelSpec:
    return replace(
        _gemma(config, common(config, "hidden_activation")),
        windows=windows(config, lambda layer: layer % 2 == 0),
        attention_soft_cap=float(config.get("attn_logit_softcapping") or 0.0),
    )


def gemma3(config: Config) -> ModelSpec:
    if config.get("attn_logit_softcapping"):
        raise UnsupportedModel("attn_logit_softcapping is not supported: transformers ignores it in Gemma 3")
    pattern = count(config, "sliding_window_pattern")
    spec = with_two_ropes(
        config,
        lambda layer: bool((layer + 1) % pattern),
        float(config["rope_local_base_freq"]),
        "hidden_activation",
    )
    return replace(_gemma(config, spec), qk_norm="head")


def _gemma(config: Config, spec: ModelSpec) -> ModelSpec:
    if config.get("use_bidirectional_attention"):
        raise UnsupportedModel("use_bidirectional_attention is not supported")
    bias = bool(config.get("attention_bias", False))
    return replace(
        spec,
        qkv_bias=bias,
        out_bias=bias,
        norms=SANDWICH,
        unit_offset_norm=True,
        embedding_scale=float(spec.hidden_size) ** 0.5,
        query_scale=float(config["query_pre_attn_scalar"]) ** -0.5,
        logit_soft_cap=float(config.get("final_logit_softcapping") or 0.0),
    )


def granite(config: Config) -> ModelSpec:
    return replace(llama(config), **multipliers(config))


def olmo2(config: Config) -> ModelSpec:
    return _olmo(config, common(config))


def olmo3(config: Config) -> ModelSpec:
    theta = float(config["rope_theta"])
    return _olmo(config, with_two_ropes(config, lambda layer: (layer + 1) % 4 != 0, theta))


def _olmo(config: Config, spec: ModelSpec) -> ModelSpec:
    bias = bool(config.get("attention_bias", False))
    return replace(spec, qkv_bias=bias, out_bias=bias, norms=BEHIND, qk_norm="projection")


def phi3(config: Config) -> ModelSpec:
    rope = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    kind = rope.pop("type", None)
    if rope.get("rope_type", kind) in ("su", "yarn"):  # what LongRoPE was called at first
        kind = rope["rope_type"] = "longrope"
    rope.setdefault("rope_type", kind)
    config = {**config, "rope_parameters": rope}
    return replace(
        partly_rotated(config, 1.0),
        fused_qkv=True,
        projections=FUSED,
        windows=windows(config, lambda _: bool(config.get("sliding_window"))),
    )


def qwen_windows(config: Config) -> tuple[int, ...]:
    if not config.get("use_sliding_window", False):
        return (0,) * count(config, "num_hidden_layers")
    return windows(config, lambda layer: layer >= int(config["max_window_layers"]))
