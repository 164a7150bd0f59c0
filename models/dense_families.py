"""Families in which every token passes every weight."""

from dataclasses import replace
from typing import Any

from core.errors import UnsupportedModel
from models.config_fields import Config, common, count, windows
from models.spec import ModelSpec

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
}
"""What a family means where its config.json lacks a key. That differs from what null means."""


def llama(config: Config) -> ModelSpec:
    bias = bool(config.get("attention_bias", False))
    return replace(common(config), qkv_bias=bias, out_bias=bias, mlp_bias=bool(config.get("mlp_bias", False)))


def mistral(config: Config) -> ModelSpec:
    return replace(common(config), windows=windows(config, lambda _: bool(config.get("sliding_window"))))


def qwen2(config: Config) -> ModelSpec:
    return replace(common(config), qkv_bias=True, windows=qwen_windows(config))


def qwen3(config: Config) -> ModelSpec:
    bias = bool(config.get("attention_bias", False))
    return replace(common(config), qkv_bias=bias, out_bias=bias, qk_norm=True, windows=qwen_windows(config))


def gemma2(config: Config) -> ModelSpec:
    if config.get("use_bidirectional_attention"):
        raise UnsupportedModel("use_bidirectional_attention is not supported")
    bias = bool(config.get("attention_bias", False))
    return replace(
        common(config, activation_key="hidden_activation"),
        qkv_bias=bias,
        out_bias=bias,
        windows=windows(config, lambda layer: layer % 2 == 0),
        post_norms=True,
        unit_offset_norm=True,
        embedding_scale=float(count(config, "hidden_size")) ** 0.5,
        query_scale=float(config["query_pre_attn_scalar"]) ** -0.5,
        attention_soft_cap=float(config.get("attn_logit_softcapping") or 0.0),
        logit_soft_cap=float(config.get("final_logit_softcapping") or 0.0),
    )


def qwen_windows(config: Config) -> tuple[int, ...]:
    if not config.get("use_sliding_window", False):
        return (0,) * count(config, "num_hidden_layers")
    return windows(config, lambda layer: layer >= int(config["max_window_layers"]))
