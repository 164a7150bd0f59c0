"""What config.json says of models with a latent KV cache, by a GGUF file."""

from typing import Any, Final

import numpy as np

from models.files.gguf_reader import Gguf

Config = dict[str, Any]
_SCORING: Final = {1: "softmax", 2: "sigmoid"}
"""llama.cpp's numbers for how experts are chosen."""
_GROUPS: Final = {256: (8, 4), 160: (8, 3)}
"""Groups of experts, and those that are chosen, of DeepSeek-V3 and V2 by their experts: older files do not say them."""


def deepseek(file: Gguf, config: Config) -> Config:
    scoring = _SCORING[file.get("expert_gating_func") or (2 if file.has("exp_probs_b.bias") else 1)]
    rotated = file.need("rope.dimension_count")
    head = file.get("attention.key_length_mla") or file.need("attention.key_length")
    said: Config = {
        "kv_lora_rank": file.need("attention.kv_lora_rank"),
        "q_lora_rank": file.get("attention.q_lora_rank"),
        "qk_rope_head_dim": rotated,
        "qk_nope_head_dim": head - rotated,
        "v_head_dim": file.get("attention.value_length_mla") or file.need("attention.value_length"),
        "num_key_value_heads": config["num_attention_heads"],
        "head_dim": rotated,
        "attention_bias": file.has("attn_q_a.bias"),
        "norm_topk_prob": bool(config.get("norm_topk_prob", False)),
        "rope_parameters": _mscaled(file, config["rope_parameters"]),
        "num_nextn_predict_layers": file.get("nextn_predict_layers", 0),
    }
    groups = _GROUPS.get(config.get("n_routed_experts", 0), (1, 1))
    said |= {
        key: config.get(key) or group for key, group in zip(("n_group", "topk_group"), groups, strict=True)
    }
    if scoring == "sigmoid":
        return {"architectures": ["DeepseekV3ForCausalLM"], **said}
    limited = "group_limited_greedy" if said["n_group"] > 1 else "greedy"
    return said | {"topk_method": limited, "routed_scaling_factor": config.get("routed_scaling_factor", 1.0)}


def _mscaled(file: Gguf, rope: Config) -> Config:
    """Return the rotation with what YaRN multiplies attention by: the file has a tenth of it (llama.cpp #17945)."""
    tenth = file.get("rope.scaling.yarn_log_multiplier")
    rope = {key: value for key, value in rope.items() if key != "partial_rotary_factor"}
    if rope["rope_type"] != "yarn" or tenth is None:
        return rope
    scale = float(np.float32(tenth) * 10)
    return {**rope, "mscale": scale, "mscale_all_dim": scale}


def mistral4(file: Gguf, config: Config) -> Config:
    said: Config = deepseek(file, config) | {"architectures": ["Mistral4ForCausalLM"]}
    if (growth := file.get("attention.temperature_scale")) is not None:
        rope: Config = said["rope_parameters"]
        said["rope_parameters"] = {**rope, "llama_4_scaling_beta": growth}
    return said


def glm_dsa(file: Gguf, config: Config) -> Config:
    kinds = file.get("attention.indexer.types")
    said: Config = {
        "index_n_heads": file.need("attention.indexer.head_count"),
        "index_head_dim": file.need("attention.indexer.key_length"),
        "index_topk": file.need("attention.indexer.top_k"),
    }
    for key, name in (
        ("index_topk_freq", "top_k_frequency"),
        ("index_skip_topk_offset", "skip_top_k_offset"),
    ):
        if (found := file.get(f"attention.indexer.{name}")) is not None:
            said[key] = found
    if kinds is not None:
        said["indexer_types"] = ["full" if whole else "shared" for whole in kinds][
            : config["num_hidden_layers"]
        ]
    return deepseek(file, config) | said | {"architectures": ["GlmMoeDsaForCausalLM"]}
