"""Which tensors of a checkpoint a GGUF file has, under which names, and how they are stored otherwise there.

The file's names are llama.cpp's (`gguf-py/gguf/constants.py`), and the others those that Baton's families read."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from models.files.gguf_reader import Gguf, most

Change = Callable[[np.ndarray], np.ndarray]
ENDS: Final = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "token_embd_norm": "model.norm",  # LFM2's
    "output": "lm_head",
    "per_layer_token_embd": "model.embed_tokens_per_layer",
    "per_layer_model_proj": "model.per_layer_model_projection",
    "per_layer_proj_norm": "model.per_layer_projection_norm",
}
IGNORED: Final = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
"""What config.json says."""
EXPERTS: Final = "{}"
"""Stands in a name for the number of an expert; the file has all of a layer in one tensor."""
_LAYER: Final = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_NEXT: Final = {
    "nextn.eh_proj": "eh_proj",
    "nextn.enorm": "enorm",
    "nextn.hnorm": "hnorm",
    "nextn.embed_tokens": "embed_tokens",
    "nextn.shared_head_head": "shared_head.head",
    "nextn.shared_head_norm": "shared_head.norm",
}
_NEXT_APART: Final = {
    "nextn.eh_proj.weight": "mtp.fc.weight",
    "nextn.enorm.weight": "mtp.pre_fc_norm_embedding.weight",
    "nextn.hnorm.weight": "mtp.pre_fc_norm_hidden.weight",
    "nextn.shared_head_norm.weight": "mtp.norm.weight",
}
_SANDWICH: Final = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_FUSED: Final = {"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"}
_LATENT: Final = {
    "attn_q_a": "self_attn.q_a_proj",
    "attn_q_a_norm": "self_attn.q_a_layernorm",
    "attn_q_b": "self_attn.q_b_proj",
    "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
    "attn_kv_a_norm": "self_attn.kv_a_layernorm",
    "attn_kv_b": "self_attn.kv_b_proj",
    "attn_k_b": "self_attn.k_b_proj",
    "attn_v_b": "self_attn.v_b_proj",
}
_HUNYUAN: Final = {"attn_q_norm": "self_attn.query_layernorm", "attn_k_norm": "self_attn.key_layernorm"}


def _moe(
    block: str = "mlp",
    shared: str = "shared_experts",
    projections: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj"),
    router: str = "gate",
    bias: str = "gate.e_score_correction_bias",
) -> dict[str, str]:
    gate, up, down = projections
    each, beside = f"{block}.experts.{EXPERTS}", f"{block}.{shared}"
    return {
        "ffn_gate_inp": f"{block}.{router}",
        "ffn_gate_exps": f"{each}.{gate}",
        "ffn_up_exps": f"{each}.{up}",
        "ffn_down_exps": f"{each}.{down}",
        "ffn_gate_shexp": f"{beside}.gate_proj",
        "ffn_up_shexp": f"{beside}.up_proj",
        "ffn_down_shexp": f"{beside}.down_proj",
        "exp_probs_b.bias": f"{block}.{bias}",
        "exp_probs_b": f"{block}.{bias}",
    }


def _minus_one(numbers: np.ndarray) -> np.ndarray:
    return numbers - 1


def _one_row(numbers: np.ndarray) -> np.ndarray:
    return numbers.reshape(1, -1)


def _log_rates(numbers: np.ndarray) -> np.ndarray:
    """A_log, of which the file has the rates themselves, below 0."""
    return np.log(-numbers.reshape(-1))


def _flat(numbers: np.ndarray) -> np.ndarray:
    return numbers.reshape(-1)


def _filters(numbers: np.ndarray) -> np.ndarray:
    """A convolution's (channels, 1, kernel)."""
    return numbers.reshape(-1, 1, numbers.shape[-1])


@dataclass(frozen=True, slots=True)
class Names:
    layer: Mapping[str, str] = field(default_factory=dict[str, str])
    """What names of a layer are here, where they are not those of Llama: whole ones, or without `.weight` and `.bias`"""
    changes: Mapping[str, Change] = field(default_factory=dict[str, Change])
    """How numbers differ: by the end of the file's name"""
    by_pairs: bool = False
    """Whether rows of queries and keys are in the order of rotated pairs, as Llama's are"""
    by_turns: bool = False
    """Whether the value heads of gated delta layers are not by their key heads, but first the first one of each, and so on"""
    next_apart: bool = False
    """Whether the layers that predict further tokens have names of their own, and are not behind the others"""

    def of(self, name: str, num_layers: int) -> str | None:
        """Return the name here of a tensor of the file; None for one that is not known. `num_layers`: without those behind them,
        which predict further tokens."""
        stem, _, what = name.rpartition(".")
        if not name.startswith("blk."):
            return f"{ENDS[stem]}.{what}" if stem in ENDS else None
        _, number, part = name.split(".", 2)
        known = {**_LAYER, **_NEXT, **self.layer}
        prefix = f"model.layers.{number}."
        if self.next_apart and int(number) >= num_layers:
            if (found := _NEXT_APART.get(part)) is not None:
                return found
            prefix = f"mtp.layers.{int(number) - num_layers}."
        if part in known:
            return prefix + known[part]
        part = part.removesuffix(f".{what}")
        return f"{prefix}{known[part]}.{what}" if part in known else None

    def change(self, name: str) -> Change | None:
        return next((change for end, change in self.changes.items() if name.endswith(end)), None)


_SHIFTED: Final = {"norm.weight": _minus_one}
_DELTA: Final = {
    "attn_qkv": "linear_attn.in_proj_qkv",
    "attn_gate": "linear_attn.in_proj_z",
    "ssm_in": "linear_attn.in_proj_qkvz",
    "ssm_ba": "linear_attn.in_proj_ba",
    "ssm_beta": "linear_attn.in_proj_b",
    "ssm_alpha": "linear_attn.in_proj_a",
    "ssm_conv1d": "linear_attn.conv1d",
    "ssm_a": "linear_attn.A_log",
    "ssm_dt.bias": "linear_attn.dt_bias",
    "ssm_norm": "linear_attn.norm",
    "ssm_out": "linear_attn.out_proj",
    "post_attention_norm": "post_attention_layernorm",
}
_OF_DELTA: Final = {"ssm_a": _log_rates, "ssm_conv1d.weight": _filters, "ssm_norm.weight": _flat, **_SHIFTED}
_SPACE: Final = {
    "ssm_in": "mamba.in_proj",
    "ssm_conv1d": "mamba.conv1d",
    "ssm_a": "mamba.A_log",
    "ssm_d": "mamba.D",
    "ssm_dt.bias": "mamba.dt_bias",
    "ssm_norm": "mamba.norm",
    "ssm_out": "mamba.out_proj",
}
_OF_SPACE: Final = {
    "ssm_a": _log_rates,
    "ssm_d": _flat,
    "ssm_conv1d.weight": _filters,
    "ssm_norm.weight": _flat,
}
_LFM2: Final = {
    "attn_norm": "operator_norm",
    "ffn_norm": "ffn_norm",
    "ffn_gate": "feed_forward.w1",
    "ffn_up": "feed_forward.w3",
    "ffn_down": "feed_forward.w2",
    "shortconv.conv": "conv.conv",
    "shortconv.in_proj": "conv.in_proj",
    "shortconv.out_proj": "conv.out_proj",
    **_moe("feed_forward", projections=("w1", "w3", "w2"), bias="expert_bias"),
}
_NEMOTRON: Final = {
    **_SPACE,
    **_moe(),
    "attn_norm": "norm",
    "ffn_latent_down": "mlp.fc1_latent_proj",
    "ffn_latent_up": "mlp.fc2_latent_proj",
}
_GEMMA4: Final = {
    **_SANDWICH,
    "layer_output_scale.weight": "layer_scalar",
    "inp_gate": "per_layer_input_gate",
    "proj": "per_layer_projection",
    "post_norm": "post_per_layer_input_norm",
    "ffn_gate_inp": "router.proj",
    "ffn_gate_inp.scale": "router.scale",
    "ffn_down_exps.scale": "router.per_expert_scale",
    "ffn_gate_up_exps": f"experts.{EXPERTS}.gate_up_proj",
    "ffn_down_exps": f"experts.{EXPERTS}.down_proj",
    "pre_ffw_norm_2": "pre_feedforward_layernorm_2",
    "post_ffw_norm_1": "post_feedforward_layernorm_1",
    "post_ffw_norm_2": "post_feedforward_layernorm_2",
}
_KIMI: Final = {
    **_LATENT,
    **_moe(projections=("w1", "w3", "w2")),
    **{f"ssm_conv1d_{each}": f"self_attn.{each}_conv1d" for each in "qkv"},
    "ssm_f_a": "self_attn.f_a_proj",
    "ssm_f_b": "self_attn.f_b_proj",
    "ssm_g_a": "self_attn.g_a_proj",
    "ssm_g_b": "self_attn.g_b_proj",
    "ssm_beta": "self_attn.b_proj",
    "ssm_a": "self_attn.A_log",
    "ssm_dt.bias": "self_attn.dt_bias",
    "ssm_norm": "self_attn.o_norm",
}
_INDEXER: Final = {
    "indexer.attn_q_b": "self_attn.indexer.wq_b",
    "indexer.attn_k": "self_attn.indexer.wk",
    "indexer.k_norm": "self_attn.indexer.k_norm",
    "indexer.proj": "self_attn.indexer.weights_proj",
}
_QWEN: Final = _moe(shared="shared_expert") | {"ffn_gate_inp_shexp": "mlp.shared_expert_gate"}
_MIXTRAL: Final = _moe("block_sparse_moe", projections=("w1", "w3", "w2"), bias="e_score_correction_bias")
NAMES: Final = {
    "llama": Names(_MIXTRAL, by_pairs=True),
    "mistral3": Names(by_pairs=True),
    "qwen2": Names(),
    "qwen2moe": Names(_QWEN, {"ffn_gate_inp_shexp.weight": _one_row}),
    "qwen3": Names(),
    "qwen3moe": Names(_moe()),
    "gemma2": Names(_SANDWICH, _SHIFTED),
    "gemma3": Names(_SANDWICH, _SHIFTED),
    "qwen2vl": Names(),
    "qwen3vl": Names(),
    "qwen3vlmoe": Names(_moe()),
    "phi3": Names(_FUSED),
    "granite": Names(by_pairs=True),
    "granitemoe": Names(
        {
            **_moe("block_sparse_moe", router="router.layer"),
            **{f"ffn_{each}_shexp": f"shared_mlp.{each}_proj" for each in ("gate", "up", "down")},
        },
        by_pairs=True,
    ),
    "olmo2": Names(_SANDWICH),
    "smollm3": Names(by_pairs=True),
    "seed_oss": Names({"post_attention_norm": "post_attention_layernorm"}),
    "exaone4": Names(_SANDWICH),
    "ernie4_5": Names(),
    "ernie4_5-moe": Names(_moe(bias="moe_statics.e_score_correction_bias"), {"exp_probs_b.bias": _one_row}),
    "command-r": Names(),
    "cohere2": Names(),
    "glm4": Names(
        {**_FUSED, "post_attention_norm": "post_self_attn_layernorm", "post_ffw_norm": "post_mlp_layernorm"}
    ),
    "glm4moe": Names({**_moe(), "post_attention_norm": "post_attention_layernorm"}),
    "hunyuan-dense": Names(_HUNYUAN),
    "hunyuan-moe": Names({**_HUNYUAN, **_moe(shared="shared_mlp", router="gate.wg")}),
    "dots1": Names(_moe()),
    "minimax-m2": Names(_MIXTRAL),
    "gpt-oss": Names(
        {
            **_moe(router="router"),
            "post_attention_norm": "post_attention_layernorm",
            "attn_sinks.weight": "self_attn.sinks",
            **{f"ffn_{each}_exps.bias": f"mlp.experts.{each}_proj_bias" for each in ("gate", "up", "down")},
        }
    ),
    "deepseek2": Names({**_LATENT, **_moe()}),
    "glm-dsa": Names({**_LATENT, **_INDEXER, **_moe()}),
    "mistral4": Names({**_LATENT, **_moe(), "ffn_gate_up_exps": f"mlp.experts.{EXPERTS}.gate_up_proj"}),
    "kimi-linear": Names(
        _KIMI,
        {
            "ssm_a": lambda numbers: np.log(-numbers).reshape(1, 1, -1, 1),
            "ssm_conv1d_q.weight": _filters,
            "ssm_conv1d_k.weight": _filters,
            "ssm_conv1d_v.weight": _filters,
        },
    ),
    "qwen3next": Names({**_QWEN, **_DELTA}, {"ffn_gate_inp_shexp.weight": _one_row, **_OF_DELTA}),
    "qwen35": Names(_DELTA, _OF_DELTA, by_turns=True, next_apart=True),
    "qwen35moe": Names(
        {**_QWEN, **_DELTA},
        {"ffn_gate_inp_shexp.weight": _one_row, **_OF_DELTA},
        by_turns=True,
        next_apart=True,
    ),
    "lfm2": Names(_LFM2, {"shortconv.conv.weight": _filters}),
    "lfm2moe": Names(_LFM2, {"shortconv.conv.weight": _filters}),
    "granitehybrid": Names(
        {
            **_SPACE,
            **_moe("block_sparse_moe", router="router.layer"),
            **{f"ffn_{each}": f"shared_mlp.{each}_proj" for each in ("gate", "up", "down")},
            **{f"ffn_{each}_shexp": f"shared_mlp.{each}_proj" for each in ("gate", "up", "down")},
        },
        _OF_SPACE,
        by_pairs=True,
    ),
    "nemotron_h": Names(_NEMOTRON, _OF_SPACE),
    "nemotron_h_moe": Names(_NEMOTRON, _OF_SPACE, next_apart=True),
    "llama4": Names(
        {
            **_moe("feed_forward", "shared_expert", router="router"),
            **{f"ffn_{each}": f"feed_forward.{each}_proj" for each in ("gate", "up", "down")},
        }
    ),
    "gemma4": Names(_GEMMA4),
}
"""By the file's `general.architecture`."""


def row_orders(file: Gguf, names: Names) -> dict[str, np.ndarray]:
    """Return in which row of the file each row is, by the ends of names here."""
    if names.by_turns:
        return _rows_of_delta(file)
    if not names.by_pairs:
        return {}
    heads = int(file.need("attention.head_count"))
    counts = {"q_proj": heads, "k_proj": most(file.get("attention.head_count_kv", heads))}
    head_dim = int(file.get("attention.key_length") or file.need("embedding_length") // heads)
    orders = {end: _by_pairs(count, head_dim) for end, count in counts.items()}
    return {f"self_attn.{end}.{what}": order for end, order in orders.items() for what in ("weight", "bias")}


def column_orders(file: Gguf, names: Names) -> dict[str, np.ndarray]:
    """The same for columns."""
    return (
        {"linear_attn.out_proj.weight": _values_by_turns(file, 0, _value_dim(file))} if names.by_turns else {}
    )


def _rows_of_delta(file: Gguf) -> dict[str, np.ndarray]:
    keys = 2 * int(file.need("ssm.group_count")) * int(file.need("ssm.state_size"))
    wide, single = _values_by_turns(file, keys, _value_dim(file)), _values_by_turns(file, 0, 1)
    return {
        **dict.fromkeys(("linear_attn.in_proj_qkv.weight", "linear_attn.conv1d.weight"), wide),
        "linear_attn.in_proj_z.weight": _values_by_turns(file, 0, _value_dim(file)),
        **{
            f"linear_attn.{name}": single
            for name in ("in_proj_a.weight", "in_proj_b.weight", "A_log", "dt_bias")
        },
    }


def _value_dim(file: Gguf) -> int:
    return int(file.need("ssm.inner_size")) // int(file.need("ssm.time_step_rank"))


def _values_by_turns(file: Gguf, before: int, size: int) -> np.ndarray:
    """Return in which place of the file each number of the value heads is. A head has `size` numbers, and `before` others come
    first."""
    keys, heads = int(file.need("ssm.group_count")), int(file.need("ssm.time_step_rank"))
    values = np.arange(heads * size).reshape(heads // keys, keys, size).swapaxes(0, 1).ravel()
    return np.concatenate((np.arange(before), before + values))


def of_each_kind(file: Gguf) -> dict[str, np.ndarray]:
    """Return which rows of Qwen3-Next's `in_proj_ba`, by key head, are those of `in_proj_b` and of `in_proj_a`."""
    keys, heads = int(file.need("ssm.group_count")), int(file.need("ssm.time_step_rank"))
    rows = np.arange(2 * heads).reshape(keys, 2, -1)
    return {"in_proj_b": rows[:, 0].ravel(), "in_proj_a": rows[:, 1].ravel()}


def _by_pairs(heads: int, head_dim: int) -> np.ndarray:
    return np.arange(heads * head_dim).reshape(heads, -1, 2).swapaxes(1, 2).ravel()
