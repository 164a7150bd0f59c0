"""What config.json says of models some of whose layers keep a state, by a GGUF file."""

from typing import Any

from models.files.gguf_dense import biases, granite_moe
from models.files.gguf_latent import deepseek
from models.files.gguf_reader import Gguf

Config = dict[str, Any]


def linear(file: Gguf, config: Config) -> Config:
    """Return the sizes of gated delta layers."""
    heads = file.need("ssm.time_step_rank")
    return {
        "linear_conv_kernel_dim": file.need("ssm.conv_kernel"),
        "linear_key_head_dim": file.need("ssm.state_size"),
        "linear_num_key_heads": file.need("ssm.group_count"),
        "linear_num_value_heads": heads,
        "linear_value_head_dim": file.need("ssm.inner_size") // heads,
        "full_attention_interval": file.get("full_attention_interval", 4),
        "projections_by_kind": file.has("attn_qkv.weight"),
    } | biases(file, config)


def _kinds(file: Gguf, config: Config, other: str) -> list[str]:
    """Return each layer's kind: those without keys and values are `other`."""
    return [
        "full_attention" if heads else other
        for heads in file.need("attention.head_count_kv")[: config["num_hidden_layers"]]
    ]


def lfm2(file: Gguf, config: Config) -> Config:
    return {
        "norm_eps": config["rms_norm_eps"],
        "layer_types": _kinds(file, config, "conv"),
        "block_auto_adjust_ff_dim": False,
        "conv_bias": file.has("shortconv.conv.bias"),
        "use_expert_bias": file.has("exp_probs_b.bias"),
    }


def _state_space(file: Gguf, config: Config) -> Config:
    heads, inner = file.need("ssm.time_step_rank"), file.need("ssm.inner_size")
    return {
        "mamba_n_heads": heads,
        "mamba_d_head": inner // heads,
        "mamba_expand": inner // config["hidden_size"],
        "mamba_n_groups": file.need("ssm.group_count"),
        "mamba_d_state": file.need("ssm.state_size"),
        "mamba_d_conv": file.need("ssm.conv_kernel"),
        "mamba_conv_bias": file.has("ssm_conv1d.bias"),
        "mamba_proj_bias": file.has("ssm_in.bias"),
    }


def granite_hybrid(file: Gguf, config: Config) -> Config:
    said = granite_moe(file, config) | _state_space(file, config)
    return said | {
        "layer_types": _kinds(file, config, "mamba"),
        "shared_intermediate_size": file.get("expert_shared_feed_forward_length")
        or config["intermediate_size"],
        "position_embedding_type": "rope" if file.get("rope.scaling.finetuned", False) else "nope",
        "shared_mlp_projections": ["gate_proj", "up_proj", "down_proj"],
    }


def nemotron_h(file: Gguf, config: Config) -> Config:
    """A layer without keys and values is a feed-forward block or experts where it has an inner size, else a state space."""
    inner, sparse = file.need("feed_forward_length"), file.has("ffn_gate_inp.weight")
    kinds = [
        "attention" if heads else ("moe" if sparse else "mlp") if size else "mamba"
        for heads, size in zip(file.need("attention.head_count_kv"), inner, strict=True)
    ]
    spaces = _state_space(file, config)
    return {
        "layers_block_type": kinds[: config["num_hidden_layers"]],
        "layer_norm_epsilon": config["rms_norm_eps"],
        "n_groups": spaces["mamba_n_groups"],
        "mamba_num_heads": spaces["mamba_n_heads"],
        "mamba_head_dim": spaces["mamba_d_head"],
        "ssm_state_size": spaces["mamba_d_state"],
        "conv_kernel": spaces["mamba_d_conv"],
        "use_conv_bias": spaces["mamba_conv_bias"],
        "use_bias": spaces["mamba_proj_bias"],
        "mlp_bias": file.has("ffn_up.bias"),
        "moe_latent_size": file.get("moe_latent_size"),
        "n_group": file.get("expert_group_count", 1),
        "topk_group": file.get("expert_group_used_count", 1),
    }


def kimi_linear(file: Gguf, config: Config) -> Config:
    return deepseek(file, config) | {
        "architectures": ["KimiLinearForCausalLM"],
        "layer_types": _kinds(file, config, "linear_attention"),
        "linear_head_dim": file.need("kda.head_dim"),
        "linear_num_heads": config["num_attention_heads"],
        "linear_conv_kernel_dim": file.need("ssm.conv_kernel"),
    }
