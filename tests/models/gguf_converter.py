"""The metadata that llama.cpp's converter writes for a checkpoint (`tests.models.gguf_tensors` has the tensors).

`python -m benchmarks.models.gguf_parity` has llama.cpp itself compute what is written here."""

import math
from collections.abc import Callable
from typing import Any

_KEYS = {
    "hidden_size": ["embedding_length"],
    "num_hidden_layers": ["block_count"],
    "intermediate_size": ["feed_forward_length"],
    "num_attention_heads": ["attention.head_count"],
    "num_key_value_heads": ["attention.head_count_kv"],
    "head_dim": ["attention.key_length", "attention.value_length"],
    "max_position_embeddings": ["context_length"],
    "rms_norm_eps": ["attention.layer_norm_rms_epsilon"],
    "layer_norm_eps": ["attention.layer_norm_epsilon"],
    "sliding_window": ["attention.sliding_window"],
    "vocab_size": ["vocab_size"],
    "num_experts": ["expert_count"],
    "num_local_experts": ["expert_count"],
    "n_routed_experts": ["expert_count"],
    "moe_num_experts": ["expert_count"],
    "num_experts_per_tok": ["expert_used_count"],
    "moe_k": ["expert_used_count"],
    "moe_intermediate_size": ["expert_feed_forward_length"],
    "shared_expert_intermediate_size": ["expert_shared_feed_forward_length"],
    "shared_intermediate_size": ["expert_shared_feed_forward_length"],
    "n_shared_experts": ["expert_shared_count"],
    "moe_num_shared_experts": ["expert_shared_count"],
    "first_k_dense_replace": ["leading_dense_block_count"],
    "moe_layer_start_index": ["leading_dense_block_count"],
    "moe_layer_interval": ["interleave_moe_layer_step"],
    "routed_scaling_factor": ["expert_weights_scale"],
    "norm_topk_prob": ["expert_weights_norm"],
    "n_group": ["expert_group_count"],
    "topk_group": ["expert_group_used_count"],
    "attention_multiplier": ["attention.scale"],
    "embedding_multiplier": ["embedding_scale"],
    "residual_multiplier": ["residual_scale"],
    "logits_scaling": ["logit_scale"],
    "logit_scale": ["logit_scale"],
    "attn_logit_softcapping": ["attn_logit_softcapping"],
    "final_logit_softcapping": ["final_logit_softcapping"],
    "q_lora_rank": ["attention.q_lora_rank"],
    "kv_lora_rank": ["attention.kv_lora_rank"],
}
_OF_EXPERTS = ("expert_count", "expert_used_count", "expert_group_count", "expert_group_used_count", "expert_weights_norm",
    "expert_weights_scale", "expert_shared_count", "expert_feed_forward_length")  # fmt: skip


def write_metadata(writer: Any, config: Any, architecture: str) -> None:
    config.allow_global_per_layer_attribute_access = True
    said: dict[str, Any] = {
        name: value
        for key, names in _KEYS.items()
        if (value := getattr(config, key, None)) is not None
        for name in names
    }
    rope = getattr(config, "rope_parameters", None) or {}
    said |= _rope(rope.get("full_attention", rope), config) | _MORE.get(architecture, lambda _: {})(config)
    for name, value in said.items():
        if value is not None:
            add = _adder(writer, value)
            add(f"{architecture}.{name}", value)


def _adder(writer: Any, value: Any) -> Callable[[str, Any], None]:
    kinds = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
    return writer.add_array if isinstance(value, list) else kinds[type(value)]


def _rope(rope: dict[str, Any], config: Any) -> dict[str, Any]:
    said: dict[str, Any] = {"rope.freq_base": rope.get("rope_theta", 10000.0)}
    head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    if (part := rope.get("partial_rotary_factor")) is not None:
        said["rope.dimension_count"] = int(head * part)
    if rope.get("rope_type") in ("linear", "yarn"):
        said |= {"rope.scaling.type": rope["rope_type"], "rope.scaling.factor": rope["factor"]}
        said["rope.scaling.original_context_length"] = rope.get("original_max_position_embeddings")
    return said


def _latent(config: Any) -> dict[str, Any]:
    rank, rotated = config.kv_lora_rank, config.qk_rope_head_dim
    scale = (getattr(config, "rope_parameters", None) or {}).get("mscale_all_dim")
    return {
        "attention.head_count_kv": 1,
        "rope.dimension_count": rotated,
        "attention.key_length": rank + rotated,
        "attention.value_length": rank,
        "attention.key_length_mla": config.qk_nope_head_dim + rotated,
        "attention.value_length_mla": config.v_head_dim,
        "rope.scaling.yarn_log_multiplier": None if scale is None else 0.1 * scale,
        "expert_gating_func": 1 if config.model_type == "deepseek_v2" else 2,
        "leading_dense_block_count": _dense(config),
    }


def _dense(config: Any) -> int:
    kinds = getattr(config, "mlp_layer_types", None)
    return config.first_k_dense_replace if kinds is None else kinds.count("dense")


def _hunyuan(config: Any) -> dict[str, Any]:
    """The base is what the original scaling by `alpha` makes of it."""
    rope, size = config.rope_parameters, config.head_dim
    return {"rope.freq_base": rope["rope_theta"] * rope["alpha"] ** (size / (size - 2))}


def _linear(config: Any) -> dict[str, Any]:
    heads = config.linear_num_value_heads
    return {
        "ssm.conv_kernel": config.linear_conv_kernel_dim,
        "ssm.state_size": config.linear_key_head_dim,
        "ssm.group_count": config.linear_num_key_heads,
        "ssm.time_step_rank": heads,
        "ssm.inner_size": config.linear_value_head_dim * heads,
        "full_attention_interval": len(config.layer_types),
        "rope.dimension_sections": [11, 11, 10, 0],
    }


def _kv_heads(config: Any) -> dict[str, Any]:
    attends = [kind in ("attention", "full_attention") for kind in config.layer_types]
    return {"attention.head_count_kv": [config.num_key_value_heads if each else 0 for each in attends]}


def _lfm2(config: Any) -> dict[str, Any]:
    return {
        **_kv_heads(config),
        "shortconv.l_cache": config.conv_L_cache,
        "attention.layer_norm_rms_epsilon": config.norm_eps,
        "leading_dense_block_count": getattr(config, "num_dense_layers", None),
        "expert_gating_func": 2 if config.model_type == "lfm2_moe" else None,
    }


def _granite_hybrid(config: Any) -> dict[str, Any]:
    return {
        **_kv_heads(config),
        "ssm.conv_kernel": config.mamba_d_conv,
        "ssm.state_size": config.mamba_d_state,
        "ssm.group_count": config.mamba_n_groups,
        "ssm.inner_size": config.mamba_n_heads * config.mamba_d_head,
        "ssm.time_step_rank": config.mamba_n_heads,
        "rope.scaling.finetuned": False,
    }


def _nemotron_h(config: Any) -> dict[str, Any]:
    sparse = "moe" in config.layer_types
    inner = config.moe_intermediate_size if sparse else config.intermediate_size
    return {
        **_kv_heads(config),
        "feed_forward_length": [inner if kind in ("mlp", "moe") else 0 for kind in config.layer_types],
        "attention.layer_norm_rms_epsilon": config.layer_norm_epsilon,
        "attention.layer_norm_epsilon": config.layer_norm_epsilon,
        "ssm.conv_kernel": config.conv_kernel,
        "ssm.state_size": config.ssm_state_size,
        "ssm.group_count": config.n_groups,
        "ssm.inner_size": config.mamba_num_heads * config.mamba_head_dim,
        "ssm.time_step_rank": config.mamba_num_heads,
        "expert_shared_feed_forward_length": config.moe_shared_expert_intermediate_size if sparse else None,
        "expert_shared_count": 1 if sparse else None,
        "moe_latent_size": config.moe_latent_size if sparse else None,
        **({} if sparse else dict.fromkeys(_OF_EXPERTS)),
    }


def _llama4(config: Any) -> dict[str, Any]:
    return {
        "feed_forward_length": config.intermediate_size_mlp,
        "expert_feed_forward_length": config.intermediate_size,
        "interleave_moe_layer_step": config.interleave_moe_layer_step,
        "rope.dimension_count": config.head_dim,
    }


def _gemma4(config: Any) -> dict[str, Any]:
    slides = [kind == "sliding_attention" for kind in config.layer_types]
    each = [config.per_layer_config[layer] for layer in range(config.num_hidden_layers)]
    within, full = (
        next(own for own, sliding in zip(each, slides, strict=True) if sliding is which)
        for which in (True, False)
    )
    inner, shared, ropes = config.intermediate_size, config.num_kv_shared_layers, config.rope_parameters
    wide = [bool(config.use_double_wide_mlp) and at >= len(each) - shared for at in range(len(each))]
    return {
        "attention.shared_kv_layers": shared,
        "embedding_length_per_layer_input": config.hidden_size_per_layer_input or 0,
        "attention.sliding_window_pattern": slides,
        **dict.fromkeys(
            ("attention.key_length", "attention.value_length", "rope.dimension_count"), full.head_dim
        ),
        **dict.fromkeys(
            ("attention.key_length_swa", "attention.value_length_swa", "rope.dimension_count_swa"),
            within.head_dim,
        ),
        "attention.head_count_kv": [own.num_key_value_heads for own in each],
        "feed_forward_length": [inner * (1 + double) for double in wide] if any(wide) else inner,
        "rope.freq_base": ropes["full_attention"]["rope_theta"],
        "rope.freq_base_swa": ropes["sliding_attention"]["rope_theta"],
        "expert_used_count": getattr(config, "top_k_experts", None),
    }


def _indexed(config: Any) -> dict[str, Any]:
    return {
        **_latent(config),
        "attention.indexer.head_count": config.index_n_heads,
        "attention.indexer.key_length": config.index_head_dim,
        "attention.indexer.top_k": config.index_topk,
        "attention.indexer.types": [kind == "full" for kind in config.indexer_types or []] or None,
    }


def _kimi(config: Any) -> dict[str, Any]:
    return {
        **_latent(config),
        "attention.head_count_kv": [int(kind == "full_attention") for kind in config.layer_types],
        "ssm.conv_kernel": config.linear_conv_kernel_dim,
        "kda.head_dim": config.linear_head_dim,
        "expert_shared_count": config.n_shared_experts,
    }


_MORE: dict[str, Callable[[Any], dict[str, Any]]] = {
    "llama": lambda config: {"rope.dimension_count": config.head_dim},
    "mistral3": lambda config: {
        "rope.dimension_count": config.head_dim,
        "rope.scaling.yarn_log_multiplier": config.rope_parameters["mscale_all_dim"],
        "attention.temperature_scale": config.rope_parameters["llama_4_scaling_beta"],
    },
    "smollm3": lambda config: {"rope.dimension_count": config.hidden_size // config.num_attention_heads},
    "gpt-oss": lambda config: {"expert_feed_forward_length": config.intermediate_size},
    "minimax-m2": lambda config: {
        "expert_feed_forward_length": config.intermediate_size,
        "expert_gating_func": 2,
    },
    "hunyuan-dense": _hunyuan,
    "hunyuan-moe": lambda config: {
        **_hunyuan(config),
        "expert_feed_forward_length": config.intermediate_size,
        "expert_shared_feed_forward_length": config.intermediate_size,
        "expert_shared_count": 1,
        "expert_used_count": config.moe_topk,
    },
    "glm4moe": lambda config: {"expert_gating_func": 2, "leading_dense_block_count": _dense(config)},
    "dots1": lambda config: {"expert_gating_func": 2, "leading_dense_block_count": _dense(config)},
    "phi3": lambda config: {
        "rope.scaling.attn_factor": (1 + math.log(4) / math.log(32)) ** 0.5,
        "attention.sliding_window": config.sliding_window or 0,
        "rope.scaling.original_context_length": config.original_max_position_embeddings,
    },
    "exaone4": lambda config: {
        "attention.sliding_window_pattern": [kind == "sliding_attention" for kind in config.layer_types]
    },
    "deepseek2": _latent,
    "glm-dsa": _indexed,
    "mistral4": lambda config: {
        **_latent(config),
        "expert_gating_func": 1,
        "attention.temperature_scale": config.rope_parameters["llama_4_scaling_beta"],
        "attention.temperature_length": config.rope_parameters["original_max_position_embeddings"],
    },
    "kimi-linear": _kimi,
    "qwen3next": _linear,
    "qwen35": _linear,
    **dict.fromkeys(
        ("qwen2vl", "qwen3vl", "qwen3vlmoe"),
        lambda _: {"rope.dimension_sections": [4, 6, 6, 0], "n_deepstack_layers": 0},
    ),
    "qwen35moe": _linear,
    "lfm2": _lfm2,
    "lfm2moe": _lfm2,
    "granitehybrid": _granite_hybrid,
    "nemotron_h": _nemotron_h,
    "nemotron_h_moe": _nemotron_h,
    "llama4": _llama4,
    "gemma4": _gemma4,
    "ernie4_5-moe": lambda config: {
        "expert_shared_feed_forward_length": config.moe_intermediate_size * config.moe_num_shared_experts
    },
}
