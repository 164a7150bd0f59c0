"""What config.json says of models whose layers all keep keys and values, by a GGUF file."""

from typing import Any

from models.files.gguf_reader import Gguf

Config = dict[str, Any]


def biases(file: Gguf, config: Config) -> Config:
    del config
    return {
        "attention_bias": file.has("attn_q.bias"),
        "attention_out_bias": file.has("attn_output.bias"),
        "mlp_bias": file.has("ffn_down.bias"),
    }


def llama(file: Gguf, config: Config) -> Config:
    if not file.has("ffn_gate_exps.weight"):
        return biases(file, config)
    experts = {
        "num_local_experts": file.need("expert_count"),
        "num_experts_per_tok": file.need("expert_used_count"),
    }
    return {"architectures": ["MixtralForCausalLM"], **experts, "sliding_window": None}


def layer_types(file: Gguf, config: Config) -> Config:
    """Return what is said of windows: a list with an entry for each layer, or every how many layers there is none."""
    pattern = file.get("attention.sliding_window_pattern")
    if isinstance(pattern, list):
        kinds = ["sliding_attention" if slides else "full_attention" for slides in pattern]
        return {"layer_types": kinds[: config["num_hidden_layers"]]}
    return {} if pattern is None else {"sliding_window_pattern": pattern}


def gemma2(file: Gguf, config: Config) -> Config:
    """The 27B models divide by the mean size of a head, which llama.cpp knows by their layers, too."""
    del file
    return {"query_pre_attn_scalar": _query_scalar(config, 46)}


def gemma3(file: Gguf, config: Config) -> Config:
    return {
        **layer_types(file, config),
        "query_pre_attn_scalar": _query_scalar(config, 62),
        "rope_theta": file.get("rope.freq_base", 1e6),
        "rope_local_base_freq": file.get("rope.freq_base_swa", 1e4),
        "rope_parameters": None,
        "rope_scaling": {
            key: value for key, value in config["rope_parameters"].items() if key != "rope_theta"
        },
    }


def _query_scalar(config: Config, layers_of_27b: int) -> int:
    if config["num_hidden_layers"] == layers_of_27b:
        return config["hidden_size"] // config["num_attention_heads"]
    return config["head_dim"]


def olmo(file: Gguf, config: Config) -> Config:
    """OLMo 3 has OLMo 2's name here, and windows."""
    biases = {"attention_bias": file.has("attn_q.bias")}
    if file.get("attention.sliding_window") is None:
        return biases
    rope = config["rope_parameters"]
    plain = {"rope_type": "default", "rope_theta": rope["rope_theta"]}
    ropes = {"full_attention": rope, "sliding_attention": plain}
    return {
        "architectures": ["Olmo3ForCausalLM"],
        "rope_parameters": ropes,
        **biases,
        **layer_types(file, config),
    }


def phi3(file: Gguf, config: Config) -> Config:
    short, long = (file.numbers(f"rope_factors_{which}.weight") for which in ("short", "long"))
    said: Config = {"sliding_window": config.get("sliding_window") or None}
    original = file.get("rope.scaling.original_context_length") or config["max_position_embeddings"]
    said["original_max_position_embeddings"] = original
    if short is None or long is None:
        return said
    lists = {"short_factor": short.tolist(), "long_factor": long.tolist()}
    factor = config["max_position_embeddings"] / original
    scaled = {
        "rope_type": "longrope",
        "factor": factor,
        "original_max_position_embeddings": original,
        **lists,
    }
    if (attention := file.get("rope.scaling.attn_factor")) is not None:
        scaled["attention_factor"] = attention
    return said | {"rope_parameters": {**config["rope_parameters"], **scaled}}


def exaone4(file: Gguf, config: Config) -> Config:
    if config.get("sliding_window"):
        return layer_types(file, config)
    return {"sliding_window": None, "layer_types": ["full_attention"] * config["num_hidden_layers"]}


def minimax(file: Gguf, config: Config) -> Config:
    return {"intermediate_size": file.get("expert_feed_forward_length") or config["intermediate_size"]}


def gpt_oss(file: Gguf, config: Config) -> Config:
    rope = {**config["rope_parameters"]}
    if rope["rope_type"] == "yarn":
        rope |= {"truncate": False}
    return {
        "intermediate_size": file.need("expert_feed_forward_length"),
        "rope_parameters": rope,
    } | layer_types(file, config)


def granite_moe(file: Gguf, config: Config) -> Config:
    """Granite 4 without recurrent layers has this name, and shared experts."""
    experts = {
        "num_local_experts": file.get("expert_count", 0),
        "num_experts_per_tok": file.get("expert_used_count", 0),
    }
    said = biases(file, config) | experts
    if (shared := file.get("expert_shared_feed_forward_length")) is None:
        return said
    return said | {
        "architectures": ["GraniteMoeHybridForCausalLM"],
        "shared_intermediate_size": shared,
        "shared_mlp_projections": ["gate_proj", "up_proj", "down_proj"],
        "layer_types": ["full_attention"] * config["num_hidden_layers"],
        "position_embedding_type": "rope" if file.get("rope.scaling.finetuned", True) else "nope",
    }


def glm4_moe(file: Gguf, config: Config) -> Config:
    more = file.get("nextn_predict_layers", 0)
    return biases(file, config) | {
        "use_qk_norm": file.has("attn_q_norm.weight"),
        "num_nextn_predict_layers": more,
    }


def ministral3(file: Gguf, config: Config) -> Config:
    """Queries grow with positions beyond the length that the model was first trained on."""
    rope = {**config["rope_parameters"]}
    if (growth := file.get("attention.temperature_scale")) is not None:
        rope["llama_4_scaling_beta"] = growth
    if rope["rope_type"] == "yarn" and (scale := file.get("rope.scaling.yarn_log_multiplier")) is not None:
        rope |= {"mscale": 1.0, "mscale_all_dim": scale}
    return {"rope_parameters": rope}


def llama4(file: Gguf, config: Config) -> Config:
    """Maverick, with 128 experts, has no norms of queries and keys; llama.cpp knows it by that, too."""
    experts = file.need("expert_count")
    return {
        "intermediate_size": file.need("expert_feed_forward_length"),
        "intermediate_size_mlp": config["intermediate_size"],
        "use_qk_norm": experts != 128,
        "attention_chunk_size": file.get("attention.sliding_window", 8192),
    }


def gemma4(file: Gguf, config: Config) -> Config:
    slides = file.need("attention.sliding_window_pattern")[: config["num_hidden_layers"]]
    heads, inner = file.need("attention.head_count_kv"), file.need("feed_forward_length")
    each = heads if isinstance(heads, list) else [heads] * len(slides)
    within = next(count for count, sliding in zip(each, slides, strict=False) if sliding)
    full = next(count for count, sliding in zip(each, slides, strict=False) if not sliding)
    alike = not all(
        f"blk.{layer}.attn_v.weight" in file.tensors
        for layer in range(len(slides) - file.get("attention.shared_kv_layers", 0))
    )
    plain = {"rope_type": "default", "rope_theta": file.get("rope.freq_base_swa", 1e4)}
    experts = file.get("expert_count", 0)
    return {
        **layer_types(file, config),
        "num_key_value_heads": within,
        "num_global_key_value_heads": full,
        "attention_k_eq_v": alike,
        "head_dim": file.need("attention.key_length_swa"),
        "global_head_dim": file.need("attention.key_length"),
        "num_kv_shared_layers": file.get("attention.shared_kv_layers", 0),
        "hidden_size_per_layer_input": file.get("embedding_length_per_layer_input", 0),
        "vocab_size_per_layer_input": config["vocab_size"],
        "intermediate_size": min(inner) if isinstance(inner, list) else inner,
        "use_double_wide_mlp": isinstance(inner, list) and max(inner) > min(inner),
        "enable_moe_block": bool(experts),
        "num_experts": experts or None,
        "top_k_experts": file.get("expert_used_count"),
        "rope_parameters": {"full_attention": config["rope_parameters"], "sliding_attention": plain},
    }
