"""GLM-4, dense and with experts: half of each head is rotated."""

from dataclasses import replace
from typing import Any

from models.families.deepseek import CHOICE_BIAS, biased_routing, experts
from models.families.dense import FUSED
from models.spec.config_fields import Config, mtp_layers, partly_rotated
from models.spec.model_spec import LayerNorms, ModelSpec

_GLM: dict[str, Any] = {
    "attention_bias": True,
    "head_dim": 128,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1.5625e-07,
}
DEFAULTS: dict[str, dict[str, Any]] = {
    "GlmForCausalLM": _GLM,
    "Glm4ForCausalLM": _GLM,
    "Glm4MoeForCausalLM": {
        "first_k_dense_replace": 1,
        "moe_intermediate_size": 1408,
        "n_group": 1,
        "n_routed_experts": 128,
        "n_shared_experts": 1,
        "norm_topk_prob": True,
        "num_experts_per_tok": 8,
        "num_key_value_heads": 8,
        "num_nextn_predict_layers": 1,
        "routed_scaling_factor": 1.0,
        "topk_group": 1,
    },
}
"""As in `models.families.dense`."""


def glm(config: Config) -> ModelSpec:
    return replace(
        partly_rotated(config, 0.5),
        rotates_neighbours=True,
        qkv_bias=bool(config["attention_bias"]),
        projections=FUSED,
    )


def glm4(config: Config) -> ModelSpec:
    norms = LayerNorms(after_attention="post_self_attn_layernorm", after_mlp="post_mlp_layernorm")
    return replace(glm(config), norms=norms)


def glm4_moe(config: Config) -> ModelSpec:
    spec = partly_rotated(config, 0.5)
    return replace(
        spec,
        qkv_bias=bool(config.get("attention_bias", False)),
        qk_norm="head" if config.get("use_qk_norm") else "none",
        moe=experts(config, spec.num_layers, biased_routing(config), CHOICE_BIAS),
        mtp_layers=mtp_layers(config),
    )
