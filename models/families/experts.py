"""Families whose feed-forward blocks are mixtures of experts."""

from dataclasses import replace
from typing import Any

from core.errors import UnsupportedModel
from kernels.routing import Routing
from models.families.deepseek import CHOICE_BIAS, biased_routing, experts
from models.spec.config_fields import Config, common, count, multipliers, partly_rotated, windows
from models.spec.model_spec import ModelSpec, MoeSpec

_QWEN: dict[str, Any] = {"decoder_sparse_step": 1, "norm_topk_prob": False, "sliding_window": 4096}
DEFAULTS: dict[str, dict[str, Any]] = {
    "MixtralForCausalLM": {
        "num_key_value_heads": 8,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "rope_theta": 1e6,
    },
    "Qwen2MoeForCausalLM": {
        **_QWEN,
        "num_key_value_heads": 16,
        "num_experts": 60,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 1408,
        "shared_expert_intermediate_size": 5632,
        "max_window_layers": 28,
        "qkv_bias": True,
    },
    "Qwen3MoeForCausalLM": {
        **_QWEN,
        "num_key_value_heads": 4,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
    },
    "Qwen3VLMoeTextModel": {**_QWEN, "norm_topk_prob": True},
    "GraniteMoeForCausalLM": {"num_local_experts": 8, "num_experts_per_tok": 2},
    "GptOssForCausalLM": {
        "attention_bias": True,
        "head_dim": 64,
        "num_key_value_heads": 8,
        "num_local_experts": 128,
        "num_experts_per_tok": 4,
        "rope_theta": 150000.0,
        "sliding_window": 128,
        "swiglu_alpha": 1.702,
        "swiglu_limit": 7.0,
    },
    "MiniMaxM2ForCausalLM": {
        "head_dim": 128,
        "num_key_value_heads": 8,
        "num_local_experts": 256,
        "num_experts_per_tok": 8,
        "rope_theta": 5e6,
    },
    "Dots1ForCausalLM": {
        "first_k_dense_replace": 0,
        "max_window_layers": 62,
        "n_group": 1,
        "n_shared_experts": None,
        "norm_topk_prob": False,
        "routed_scaling_factor": 1.0,
        "sliding_window": 4096,
        "topk_group": 1,
    },
    "Ernie4_5_MoeForCausalLM": {
        "moe_intermediate_size": 1536,
        "moe_k": 6,
        "moe_layer_end_index": -1,
        "moe_layer_interval": 1,
        "moe_layer_start_index": 1,
        "moe_num_experts": 64,
        "moe_num_shared_experts": 2,
        "num_key_value_heads": 4,
        "rope_theta": 500_000.0,
        "tie_word_embeddings": True,
    },
}
"""As in `models.families.dense`."""


_GPT_OSS_ROPE: dict[str, Any] = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}


def mixtral(config: Config) -> ModelSpec:
    spec = replace(common(config), windows=windows(config, lambda _: bool(config.get("sliding_window"))))
    moe = MoeSpec(
        num_experts=count(config, "num_local_experts"),
        intermediate_size=spec.intermediate_size,
        routing=Routing(top_k=count(config, "num_experts_per_tok")),
        sparse=(True,) * spec.num_layers,
        projections=("w1", "w3", "w2"),
    )
    return replace(spec, moe=moe)


def qwen2_moe(config: Config) -> ModelSpec:
    def slides(layer: int) -> bool:
        return layer % 2 == 0 and layer < int(config["max_window_layers"])

    moe = replace(
        qwen_experts(config),
        shared_size=count(config, "shared_expert_intermediate_size"),
        shared_name="mlp.shared_expert",
        shared_gate=True,
    )
    spec = replace(common(config), qkv_bias=bool(config["qkv_bias"]), moe=moe)
    return replace(spec, windows=windows(config, slides)) if config.get("use_sliding_window") else spec


def qwen3_moe(config: Config) -> ModelSpec:
    bias = bool(config.get("attention_bias", False))
    spec = replace(common(config), qkv_bias=bias, out_bias=bias, qk_norm="head", moe=qwen_experts(config))
    window = int(config["sliding_window"] or 0) if config.get("use_sliding_window") else 0
    return replace(spec, windows=(window,) * spec.num_layers)


def qwen3_vl_moe(config: Config) -> ModelSpec:
    """Return the decoder of Qwen3-VL with experts. Those of a layer are in one tensor, or each has tensors of its own."""
    spec = qwen3_moe(config)
    assert spec.moe is not None
    return replace(spec, moe=replace(spec.moe, transposed=True))


def granite_moe(config: Config) -> ModelSpec:
    spec, bias = common(config), bool(config.get("attention_bias", False))
    moe = granite_experts(config, spec)
    return replace(spec, qkv_bias=bias, out_bias=bias, moe=moe, **multipliers(config))


def granite_experts(config: Config, spec: ModelSpec) -> MoeSpec:
    return MoeSpec(
        num_experts=int(config["num_local_experts"] or 0),
        intermediate_size=spec.intermediate_size,
        routing=Routing(top_k=count(config, "num_experts_per_tok")),
        sparse=(True,) * spec.num_layers,
        router="router.layer",
    )


def gpt_oss(config: Config) -> ModelSpec:
    if not config.get("rope_parameters") and not config.get("rope_scaling"):
        config = {**config, "rope_parameters": _GPT_OSS_ROPE}
    spec, bias = common(config), bool(config["attention_bias"])
    moe = MoeSpec(
        num_experts=count(config, "num_local_experts"),
        intermediate_size=spec.intermediate_size,
        routing=Routing(top_k=count(config, "num_experts_per_tok")),
        sparse=(True,) * spec.num_layers,
        by_turns=True,
        mxfp4=(config.get("quantization_config") or {}).get("quant_method") == "mxfp4",
        router="router",
        router_bias=True,
    )
    return replace(
        spec,
        activation="clamped_swiglu",
        swiglu=(float(config["swiglu_alpha"]), float(config["swiglu_limit"])),
        qkv_bias=bias,
        out_bias=bias,
        sinks=True,
        windows=windows(config, lambda layer: layer % 2 == 0),
        moe=moe,
    )


def minimax_m2(config: Config) -> ModelSpec:
    for key, only in (("scoring_func", "sigmoid"), ("use_routing_bias", True), ("use_qk_norm", True)):
        if config.get(key, only) != only:
            raise UnsupportedModel(f"{key} {config[key]!r} is not supported (only {only!r})")
    if kinds := set(config.get("attn_type_list") or ()) - {1}:
        raise UnsupportedModel(
            f"attn_type_list has {sorted(kinds)[0]!r}, which is not supported (1, softmax attention, is)"
        )
    if (rotated := config.get("rotary_dim")) is not None:
        config = {**config, "partial_rotary_factor": rotated / count(config, "head_dim")}
    spec = partly_rotated(config, 1.0)
    moe = MoeSpec(
        num_experts=count(config, "num_local_experts"),
        intermediate_size=spec.intermediate_size,
        routing=Routing(top_k=count(config, "num_experts_per_tok"), scoring="sigmoid"),
        sparse=(True,) * spec.num_layers,
        projections=("w1", "w3", "w2"),
        choice_bias="e_score_correction_bias",
    )
    return replace(spec, qk_norm="projection", moe=moe)


def dots1(config: Config) -> ModelSpec:
    def slides(layer: int) -> bool:
        return bool(config["sliding_window"]) and layer >= int(config["max_window_layers"])

    spec, bias = common(config), bool(config.get("attention_bias", False))
    moe = experts(config, spec.num_layers, biased_routing(config), CHOICE_BIAS)
    return replace(
        spec, qkv_bias=bias, out_bias=bias, qk_norm="head", windows=windows(config, slides), moe=moe
    )


def ernie4_5_moe(config: Config) -> ModelSpec:
    if config.get("use_bias"):
        raise UnsupportedModel("use_bias is not supported in this family: the head would have a bias, too")
    spec, inner = common(config), count(config, "moe_intermediate_size")
    first, last = int(config["moe_layer_start_index"]), int(config["moe_layer_end_index"])
    step, last = count(config, "moe_layer_interval"), spec.num_layers - 1 if last == -1 else last
    moe = MoeSpec(
        num_experts=count(config, "moe_num_experts"),
        intermediate_size=inner,
        routing=Routing(top_k=count(config, "moe_k")),
        sparse=tuple(first <= layer <= last and (layer + 1) % step == 0 for layer in range(spec.num_layers)),
        choice_bias="moe_statics.e_score_correction_bias",
        choice_bias_is_matrix=True,
        shared_size=inner * int(config["moe_num_shared_experts"] or 0),
    )
    return replace(
        spec, rotates_neighbours=True, moe=moe if any(moe.sparse) else None, skipped_prefixes=("model.mtp_",)
    )


def qwen_experts(config: Config) -> MoeSpec:
    # transformers 5 writes as num_local_experts what older files call num_experts
    num_experts = config.get("num_local_experts") or config["num_experts"]
    step = count(config, "decoder_sparse_step")
    dense = {int(layer) for layer in config.get("mlp_only_layers") or ()}
    num_layers = count(config, "num_hidden_layers")
    return MoeSpec(
        num_experts=count({"num_experts": num_experts}, "num_experts"),
        intermediate_size=count(config, "moe_intermediate_size"),
        routing=Routing(
            top_k=count(config, "num_experts_per_tok"), renormalise=bool(config["norm_topk_prob"])
        ),
        sparse=tuple(i not in dense and (i + 1) % step == 0 for i in range(num_layers)),
    )
