"""DeepSeek-V2, V3 and R1, Kimi K2 and GLM-4.7-Flash: latent attention, shared experts, groups of experts."""

import math
from dataclasses import replace
from typing import Any

from core.errors import UnsupportedModel
from kernels.routing import Routing
from models.spec.config_fields import Config, common, count, mtp_layers, text_part
from models.spec.latent_spec import MlaSpec
from models.spec.model_spec import ModelSpec, MoeSpec

_SHARED: dict[str, Any] = {
    "attention_bias": False,
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
}
_BIASED: dict[str, Any] = {
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_nextn_predict_layers": 1,
    "rope_interleave": True,
}
DEFAULTS: dict[str, dict[str, Any]] = {
    "DeepseekV2ForCausalLM": {
        **_SHARED,
        "first_k_dense_replace": 0,
        "moe_intermediate_size": 1407,
        "n_routed_experts": 64,
        "n_shared_experts": 2,
        "routed_scaling_factor": 1.0,
        "topk_method": "greedy",
    },
    "DeepseekV3ForCausalLM": {
        **_SHARED,
        **_BIASED,
        "first_k_dense_replace": 3,
        "moe_intermediate_size": 2048,
        "n_group": 8,
        "n_routed_experts": 256,
        "num_experts_per_tok": 8,
        "routed_scaling_factor": 2.5,
        "topk_group": 4,
    },
    "KimiK25ForConditionalGeneration": {},
    "Kimi_K25ForConditionalGeneration": {},
    "Glm4MoeLiteForCausalLM": {
        **_SHARED,
        **_BIASED,
        "first_k_dense_replace": 1,
        "moe_intermediate_size": 1536,
        "n_group": 1,
        "n_routed_experts": 64,
        "num_experts_per_tok": 4,
        "q_lora_rank": 768,
        "qk_nope_head_dim": 192,
        "routed_scaling_factor": 1.8,
        "topk_group": 1,
        "v_head_dim": 256,
    },
}
"""As in `models.families.dense`."""
CHOICE_BIAS = "gate.e_score_correction_bias"
"""`MoeSpec.choice_bias` of DeepSeek-V3 and its kin."""


def deepseek_v2(config: Config) -> ModelSpec:
    if config.get("norm_topk_prob"):
        raise UnsupportedModel("norm_topk_prob is not supported with DeepSeek-V2")
    refuse_unless(config, "scoring_func", "softmax")
    method = config["topk_method"]
    if method not in ("greedy", "group_limited_greedy"):
        raise UnsupportedModel(
            f"topk_method {method!r} is not supported (greedy and group_limited_greedy are)"
        )
    routing = Routing(
        top_k=count(config, "num_experts_per_tok"),
        renormalise=False,
        scale=float(config["routed_scaling_factor"]),
    )
    if method == "group_limited_greedy":
        routing = replace(
            routing, num_groups=count(config, "n_group"), top_groups=count(config, "topk_group")
        )
    return replace(
        latent(config, routing, interleaved=True),
        mlp_bias=bool(config.get("mlp_bias", False)),
    )


def deepseek_v3(config: Config) -> ModelSpec:
    refuse_unless(config, "scoring_func", "sigmoid")
    refuse_unless(config, "topk_method", "noaux_tc")
    spec = latent(config, biased_routing(config), CHOICE_BIAS, interleaved=bool(config["rope_interleave"]))
    return replace(spec, mtp_layers=mtp_layers(config))


def kimi_of_texts(config: Config) -> ModelSpec:
    """Return the decoder of Kimi K2.5 and later, which also see: for text alone."""
    return text_part(config, deepseek_v3, DEFAULTS["DeepseekV3ForCausalLM"], "vision_tower.", "mm_projector.")


def biased_routing(config: Config) -> Routing:
    """Return the routing by sigmoids, to which a learned bias is added for the choice alone."""
    return Routing(
        top_k=count(config, "num_experts_per_tok"),
        scoring="sigmoid",
        renormalise=bool(config["norm_topk_prob"]),
        scale=float(config["routed_scaling_factor"]),
        num_groups=count(config, "n_group"),
        top_groups=count(config, "topk_group"),
        group_best=2,
    )


def experts(config: Config, num_layers: int, routing: Routing, choice_bias: str) -> MoeSpec:
    """Return the experts behind the first dense layers, or of those that `mlp_layer_types` names, and those that are shared."""
    first, inner = int(config["first_k_dense_replace"]), count(config, "moe_intermediate_size")
    kinds = config.get("mlp_layer_types") or ["sparse" if i >= first else "dense" for i in range(num_layers)]
    if len(kinds) != num_layers:
        raise UnsupportedModel(f"mlp_layer_types has {len(kinds)} entries for {num_layers} num_hidden_layers")
    return MoeSpec(
        num_experts=count(config, "n_routed_experts"),
        intermediate_size=inner,
        routing=routing,
        sparse=tuple(kind == "sparse" for kind in kinds),
        choice_bias=choice_bias,
        shared_size=inner * int(config["n_shared_experts"] or 0),
    )


def refuse_unless(config: Config, key: str, only: Any) -> None:
    if config.get(key, only) != only:
        raise UnsupportedModel(f"{key} {config[key]!r} is not supported (only {only!r})")


def latent(config: Config, routing: Routing, choice_bias: str = "", *, interleaved: bool) -> ModelSpec:
    """Return a model with a latent KV cache and experts. `interleaved`: see `MlaSpec`; `choice_bias`: see `MoeSpec`."""
    refuse_unless(config, "moe_layer_freq", 1)
    spec, bias = common(config), bool(config["attention_bias"])
    mla = MlaSpec(
        q_rank=0 if config["q_lora_rank"] is None else count(config, "q_lora_rank"),
        kv_rank=count(config, "kv_lora_rank"),
        nope_dim=count(config, "qk_nope_head_dim"),
        rope_dim=count(config, "qk_rope_head_dim"),
        value_dim=count(config, "v_head_dim"),
        interleaved=interleaved,
    )
    head_dim = mla.nope_dim + mla.rope_dim
    return replace(
        spec,
        num_kv_heads=1,
        head_dim=head_dim,
        query_scale=head_dim**-0.5 * _yarn_scale(spec),
        qkv_bias=bias,
        out_bias=bias,
        mla=mla,
        moe=experts(config, spec.num_layers, routing, choice_bias),
    )


def _yarn_scale(spec: ModelSpec) -> float:
    """Return YaRN's temperature, which these models put on the scores besides on the rotations."""
    p = spec.rope.parameters
    if spec.rope.kind != "yarn" or not p.get("mscale_all_dim"):
        return 1.0
    factor = float(p["factor"])
    return 1.0 if factor <= 1.0 else (0.1 * float(p["mscale_all_dim"]) * math.log(factor) + 1.0) ** 2
