"""Kimi-Linear: delta attention by channels, with latent attention without positions in every fourth layer, and experts."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from core.errors import UnsupportedModel
from kernels.states import StateShape
from models.families.deepseek import CHOICE_BIAS, biased_routing, latent, refuse_unless
from models.families.hybrid import kinds_of, recurrent
from models.spec.config_fields import Config, count
from models.spec.model_spec import ModelSpec
from models.spec.recurrent_spec import StateKind

DEFAULTS: dict[str, dict[str, Any]] = {
    "KimiLinearForCausalLM": {
        "attention_bias": False,
        "first_k_dense_replace": 1,
        "kv_lora_rank": 512,
        "linear_conv_kernel_dim": 4,
        "linear_head_dim": 128,
        "linear_num_heads": 32,
        "max_position_embeddings": 1048576,
        "moe_intermediate_size": 1024,
        "n_group": 1,
        "n_routed_experts": 256,
        "n_shared_experts": 1,
        "norm_topk_prob": True,
        "num_experts_per_tok": 8,
        "q_lora_rank": None,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "routed_scaling_factor": 2.446,
        "topk_group": 1,
        "v_head_dim": 128,
    }
}
"""As in `models.families.dense`."""

_NAMES = {
    "model_max_length": "max_position_embeddings",
    "moe_renormalize": "norm_topk_prob",
    "num_expert_group": "n_group",
    "num_experts": "n_routed_experts",
    "num_local_experts": "n_routed_experts",
    "num_experts_per_token": "num_experts_per_tok",
    "num_shared_experts": "n_shared_experts",
}
"""What these configurations call fields that DeepSeek's have, too."""
_OF_DELTA = {
    "head_dim": "linear_head_dim",
    "num_heads": "linear_num_heads",
    "short_conv_kernel_size": "linear_conv_kernel_dim",
}
"""What `linear_attn_config` calls fields that other configurations have outside of it."""
_KINDS: Mapping[str, StateKind] = {"full_attention": "kv", "linear_attention": "channel_delta"}


def kimi_linear(config: Config) -> ModelSpec:
    of_delta = config.get("linear_attn_config") or {}
    config = {
        **config,
        **{meant: config[name] for name, meant in _NAMES.items() if name in config},
        **{meant: of_delta[name] for name, meant in _OF_DELTA.items() if name in of_delta},
    }
    for key, only in (
        ("mla_use_nope", True),
        ("moe_router_activation_func", "sigmoid"),
        ("hidden_act", "silu"),
    ):
        refuse_unless(config, key, only)
    spec = latent(config, biased_routing(config), CHOICE_BIAS, interleaved=False)
    heads, dim = count(config, "linear_num_heads"), count(config, "linear_head_dim")
    shape = StateShape(
        num_key_heads=heads,
        num_value_heads=heads,
        key_dim=dim,
        value_dim=dim,
        conv_kernel=count(config, "linear_conv_kernel_dim"),
    )
    names = config.get("layer_types") or _layer_names(of_delta, spec.num_layers)
    moe = spec.moe
    assert moe is not None
    return replace(
        spec,
        tied=False,  # transformers has a head of its own, whatever the configuration says
        rope=replace(spec.rope, kind="none"),
        query_scale=spec.head_dim**-0.5,
        recurrent=recurrent(kinds_of(names, _KINDS, spec.num_layers), shape, spec.num_kv_heads),
        moe=replace(moe, projections=("w1", "w3", "w2")) if any(moe.sparse) else None,
    )


def _layer_names(of_delta: Mapping[str, Any], num_layers: int) -> list[str]:
    """Return each layer's kind. `linear_attn_config` numbers layers from 1; without it every fourth attends but the first."""
    lists = {"full_attention": "full_attn_layers", "linear_attention": "kda_layers"}
    if not any(name in of_delta for name in lists.values()):
        return [
            "full_attention" if layer and layer % 4 == 0 else "linear_attention"
            for layer in range(num_layers)
        ]
    kinds = {layer: kind for kind, name in lists.items() for layer in of_delta.get(name) or ()}
    if sorted(kinds) != list(range(1, num_layers + 1)):
        raise UnsupportedModel(
            f"full_attn_layers and kda_layers name the layers {sorted(kinds)} of {num_layers} in linear_attn_config"
        )
    return [kinds[layer] for layer in range(1, num_layers + 1)]
