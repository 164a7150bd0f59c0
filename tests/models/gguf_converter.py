"""What llama.cpp's converter makes of a checkpoint: metadata and tensors, with names by the package `gguf`.

`python -m benchmarks.models.gguf_parity` has llama.cpp itself compute what is written here."""

import math
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from safetensors.torch import load_file

Numbers = dict[str, np.ndarray]
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
BY_PAIRS = {"llama", "mistral3", "smollm3", "granite", "granitemoe", "granitehybrid"}
_OF_EXPERTS = ("expert_count", "expert_used_count", "expert_group_count", "expert_group_used_count", "expert_weights_norm",
    "expert_weights_scale", "expert_shared_count", "expert_feed_forward_length")  # fmt: skip
_EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.(.*)")


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


def converted(folder: Path, config: Any, architecture: str) -> Numbers:
    """The tensors of the checkpoint, as the file has them."""
    arch = next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    names = gguf.get_tensor_name_map(arch, config.num_hidden_layers)
    tensors = {name: value.float().numpy() for file in sorted(folder.glob("*.safetensors")) for name, value in load_file(file).items()}  # fmt: skip
    found = _rope_factors(config)
    if config.tie_word_embeddings:
        tensors.pop("lm_head.weight", None)
    for name, numbers in _changed(_joined(tensors), config, architecture):
        if name.startswith(("blk.", "rope_")):
            found[name] = numbers
            continue
        stored = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert stored is not None, name
        found[stored] = numbers
    return found


def _rope_factors(config: Any) -> Numbers:
    rope = getattr(config, "rope_parameters", None) or {}
    if "full_attention" in rope and rope["full_attention"].get("rope_type") == "proportional":
        full = config.layer_types.index("full_attention")
        pairs = config.per_layer_config[full].head_dim // 2
        share = rope["full_attention"]["partial_rotary_factor"]
        turned = int(pairs * share)
        return {"rope_freqs.weight": np.array([1.0] * turned + [1e30] * (pairs - turned))}
    known = {which: rope.get(f"{which}_factor") for which in ("long", "short")}
    return {f"rope_factors_{which}.weight": np.array(each) for which, each in known.items() if each}


def _joined(tensors: Numbers) -> Numbers:
    """All experts of a layer in one tensor."""
    found, experts = Numbers(), dict[str, dict[int, np.ndarray]]()
    for name, numbers in tensors.items():
        if (one := _EXPERT.fullmatch(name)) is None:
            found[name] = numbers
        else:
            experts.setdefault(f"{one[1]}.{one[3]}", {})[int(one[2])] = numbers
    return found | {
        name.replace("block_sparse_moe.experts.w", "block_sparse_moe.experts.w"): np.stack(
            [each[at] for at in sorted(each)]
        )
        for name, each in experts.items()
    }


def _changed(tensors: Numbers, config: Any, architecture: str) -> Iterator[tuple[str, np.ndarray]]:
    change = _CHANGES.get(architecture)
    for name, numbers in tensors.items():
        if architecture in BY_PAIRS:
            numbers = _by_pairs(name, numbers, config)
        if change is None:
            yield name, numbers
        else:
            yield from change(name, numbers, config)


def by_pairs(rows: np.ndarray, heads: int) -> np.ndarray:
    """llama.cpp's `LlamaModel.permute`."""
    return rows.reshape(heads, 2, -1, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)


def _by_pairs(name: str, numbers: np.ndarray, config: Any) -> np.ndarray:
    if ".q_proj." in name:
        return by_pairs(numbers, config.num_attention_heads)
    return by_pairs(numbers, config.num_key_value_heads) if ".k_proj." in name else numbers


Change = Callable[[str, np.ndarray, Any], Iterator[tuple[str, np.ndarray]]]


def _shifted(name: str, numbers: np.ndarray, config: Any) -> Iterator[tuple[str, np.ndarray]]:
    del config
    yield name, numbers + 1 if name.endswith("norm.weight") else numbers


def _router_bias(name: str, numbers: np.ndarray, config: Any) -> Iterator[tuple[str, np.ndarray]]:
    del config
    if name.endswith("e_score_correction_bias"):
        yield f"blk.{name.split('.')[2]}.exp_probs_b.bias", numbers.reshape(-1)
    else:
        yield name, numbers


def _shared_gate(name: str, numbers: np.ndarray, config: Any) -> Iterator[tuple[str, np.ndarray]]:
    del config
    yield name, numbers


def _of_latents(name: str, numbers: np.ndarray, config: Any) -> Iterator[tuple[str, np.ndarray]]:
    if not name.endswith("kv_b_proj.weight"):
        yield from _router_bias(name, numbers, config)
        return
    both = numbers.reshape(config.num_attention_heads, -1, numbers.shape[-1])
    keys, values = np.split(both, [config.qk_nope_head_dim], 1)
    yield name.replace("kv_b_proj", "k_b_proj"), keys.swapaxes(1, 2)
    yield name.replace("kv_b_proj", "v_b_proj"), values


def _granite(name: str, numbers: np.ndarray, config: Any) -> Iterator[tuple[str, np.ndarray]]:
    del config
    layer = name.split(".")[2] if ".layers." in name else ""
    for part, kind in (("block_sparse_moe.input_linear", "exps"), ("shared_mlp.input_linear", "shexp")):
        if part in name:
            gate, up = np.split(numbers, 2, -2)
            yield f"blk.{layer}.ffn_gate_{kind}.weight", gate
            yield f"blk.{layer}.ffn_up_{kind}.weight", up
            return
    yield name, numbers


def _gpt_oss(name: str, numbers: np.ndarray, config: Any) -> Iterator[tuple[str, np.ndarray]]:
    del config
    if name.endswith("sinks"):
        yield f"{name}.weight", numbers
    elif name.endswith("gate_up_proj_bias"):
        for part, each in (("gate", numbers[:, ::2]), ("up", numbers[:, 1::2])):
            yield name.replace("gate_up_proj_bias", f"{part}_proj.bias"), each
    elif name.endswith("gate_up_proj"):
        for part, each in (("gate", numbers[..., ::2]), ("up", numbers[..., 1::2])):
            yield name.replace("gate_up_proj", f"{part}_proj.weight"), each.swapaxes(1, 2)
    elif name.endswith("down_proj_bias"):
        yield name.replace("_bias", ".bias"), numbers
    elif name.endswith("down_proj"):
        yield f"{name}.weight", numbers.swapaxes(1, 2)
    else:
        yield name, numbers


def _by_turns(numbers: np.ndarray, config: Any, size: int, axis: int = 0) -> np.ndarray:
    """llama.cpp's `_reorder_v_heads`."""
    keys, heads = config.linear_num_key_heads, config.linear_num_value_heads
    shape = numbers.shape
    split = numbers.reshape(*shape[:axis], keys, heads // keys, size, *shape[axis + 1 :])
    return split.swapaxes(axis, axis + 1).reshape(shape)


def _qwen35(name: str, numbers: np.ndarray, config: Any) -> Iterator[tuple[str, np.ndarray]]:
    size, keys = config.linear_value_head_dim, 2 * config.linear_num_key_heads * config.linear_key_head_dim
    if any(part in name for part in (".in_proj_qkv.", ".conv1d.")):
        numbers = np.concatenate((numbers[:keys], _by_turns(numbers[keys:], config, size)))
    elif ".in_proj_z." in name:
        numbers = _by_turns(numbers, config, size)
    elif any(part in name for part in (".in_proj_b.", ".in_proj_a.", ".A_log", ".dt_bias")):
        numbers = _by_turns(numbers, config, 1)
    elif "linear_attn.out_proj" in name:
        numbers = _by_turns(numbers, config, size, 1)
    yield from _delta(name, numbers, config)


def _delta(name: str, numbers: np.ndarray, config: Any) -> Iterator[tuple[str, np.ndarray]]:
    del config
    if name.endswith(".A_log"):
        yield name, -np.exp(numbers)
    elif name.endswith(".dt_bias"):
        yield name.replace("dt_bias", "dt_proj.bias"), numbers
    elif "conv1d" in name:
        yield name, numbers.squeeze()
    elif name.endswith("norm.weight") and not name.endswith("linear_attn.norm.weight"):
        yield name, numbers + 1
    elif "shared_expert_gate" in name:
        yield name, numbers.squeeze()
    else:
        yield name, numbers


def _qwen3_next(name: str, numbers: np.ndarray, config: Any) -> Iterator[tuple[str, np.ndarray]]:
    if "in_proj_qkvz" not in name:
        yield from _delta(name, numbers, config)
        return
    keys, per = config.linear_num_key_heads, config.linear_num_value_heads // config.linear_num_key_heads
    sizes = np.cumsum(
        [config.linear_key_head_dim, config.linear_key_head_dim, per * config.linear_value_head_dim]
    )
    parts = np.split(numbers.reshape(keys, -1, numbers.shape[1]), sizes, 1)
    *qkv, z = (part.reshape(-1, numbers.shape[1]) for part in parts)
    layer = name.split(".")[2]
    yield f"blk.{layer}.attn_qkv.weight", np.concatenate(qkv)
    yield f"blk.{layer}.attn_gate.weight", z


def _lfm2_parts(name: str, numbers: np.ndarray, config: Any) -> Iterator[tuple[str, np.ndarray]]:
    del config
    if "conv.conv.weight" in name:
        yield name, numbers.squeeze(1)
    elif name.endswith("expert_bias"):
        yield f"blk.{name.split('.')[2]}.exp_probs_b.bias", numbers
    else:
        yield name.replace("model.layers", "layers") if ".experts." in name else name, numbers


def _space(name: str, numbers: np.ndarray, config: Any) -> Iterator[tuple[str, np.ndarray]]:
    groups = getattr(config, "mamba_n_groups", None) or config.n_groups
    if name.endswith(".A_log"):
        yield name, -np.exp(numbers).reshape(-1, 1)
    elif name.endswith((".mamba.D", ".mixer.D")):
        yield name, numbers.reshape(-1, 1)
    elif name.endswith(".dt_bias"):
        yield f"blk.{name.split('.')[2]}.ssm_dt.bias", numbers
    elif name.endswith("conv1d.weight"):
        yield name, numbers.squeeze()
    elif name.endswith(("mamba.norm.weight", "mixer.norm.weight")):
        yield name, numbers.reshape(groups, -1)
    else:
        yield name, numbers


def _granite_hybrid_parts(name: str, numbers: np.ndarray, config: Any) -> Iterator[tuple[str, np.ndarray]]:
    for renamed, part in _granite(name, numbers, config):
        yield from _space(renamed, part, config)


def _nemotron_parts(name: str, numbers: np.ndarray, config: Any) -> Iterator[tuple[str, np.ndarray]]:
    if name.endswith("e_score_correction_bias"):
        yield f"blk.{name.split('.')[2]}.exp_probs_b.bias", numbers
    elif ".experts." in name:
        yield name.replace("backbone", "model").replace("mixer", "mlp"), numbers
    else:
        yield from _space(name, numbers, config)


def _llama4_parts(name: str, numbers: np.ndarray, config: Any) -> Iterator[tuple[str, np.ndarray]]:
    del config
    layer = name.split(".")[2] if ".layers." in name else ""
    if name.endswith("experts.down_proj"):
        yield f"blk.{layer}.ffn_down_exps.weight", numbers.swapaxes(1, 2)
    elif name.endswith("experts.gate_up_proj"):
        gate, up = np.split(numbers.swapaxes(1, 2), 2, 1)
        yield f"blk.{layer}.ffn_gate_exps.weight", gate
        yield f"blk.{layer}.ffn_up_exps.weight", up
    else:
        yield name, numbers


def _gemma4_parts(name: str, numbers: np.ndarray, config: Any) -> Iterator[tuple[str, np.ndarray]]:
    del config
    layer = name.split(".")[2] if ".layers." in name else ""
    if name.endswith("router.scale"):
        yield f"blk.{layer}.ffn_gate_inp.scale", numbers
    elif name.endswith("per_expert_scale"):
        yield f"blk.{layer}.ffn_down_exps.scale", numbers
    elif name.endswith(("layer_scalar", "experts.gate_up_proj", "experts.down_proj")):
        yield f"{name}.weight", numbers
    else:
        yield name, numbers


def _stacked(name: str, numbers: np.ndarray, config: Any) -> Iterator[tuple[str, np.ndarray]]:
    whole = name.endswith(("experts.gate_up_proj", "experts.down_proj"))
    yield from _of_latents(f"{name}.weight" if whole else name, numbers, config)


def _kimi_parts(name: str, numbers: np.ndarray, config: Any) -> Iterator[tuple[str, np.ndarray]]:
    if name.endswith(".A_log"):
        yield name, -np.exp(numbers)
    elif name.endswith(".dt_bias"):
        yield name.replace("dt_bias", "dt_proj.bias"), numbers
    elif "_conv1d." in name:
        yield name, numbers.reshape(1, len(numbers), 1, -1)
    else:
        yield from _of_latents(name, numbers, config)


_CHANGES: dict[str, Change] = {
    "glm-dsa": _of_latents,
    "mistral4": _stacked,
    "kimi-linear": _kimi_parts,
    "qwen3next": _qwen3_next,
    "qwen35": _qwen35,
    "qwen35moe": _qwen35,
    "lfm2": _lfm2_parts,
    "lfm2moe": _lfm2_parts,
    "granitehybrid": _granite_hybrid_parts,
    "nemotron_h": _nemotron_parts,
    "nemotron_h_moe": _nemotron_parts,
    "llama4": _llama4_parts,
    "gemma4": _gemma4_parts,
    "gemma2": _shifted,
    "gemma3": _shifted,
    "glm4moe": _router_bias,
    "dots1": _router_bias,
    "ernie4_5-moe": _router_bias,
    "minimax-m2": _router_bias,
    "deepseek2": _of_latents,
    "granitemoe": _granite,
    "gpt-oss": _gpt_oss,
}
