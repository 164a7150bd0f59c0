"""The tensors that llama.cpp's converter makes of a checkpoint's, with names by the package `gguf`."""

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from safetensors.torch import load_file

Numbers = dict[str, np.ndarray]
BY_PAIRS = {"llama", "mistral3", "smollm3", "granite", "granitemoe", "granitehybrid"}
_EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.(.*)")


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
