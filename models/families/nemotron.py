"""Nemotron-H and Nemotron 3: each layer is Mamba-2, attention, a feed-forward block or experts, none of them with a gate."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from core.errors import UnsupportedModel
from kernels.states import StateShape
from models.families.deepseek import CHOICE_BIAS, biased_routing
from models.families.hybrid import kinds_of, recurrent
from models.spec.config_fields import Config, common, count
from models.spec.model_spec import LayerNorms, ModelSpec, MoeSpec
from models.spec.recurrent_spec import StateKind

DEFAULTS: dict[str, dict[str, Any]] = {
    "NemotronHForCausalLM": {
        "conv_kernel": 4,
        "head_dim": 128,
        "layer_norm_epsilon": 1e-5,
        "mamba_head_dim": 64,
        "mamba_num_heads": 128,
        "max_position_embeddings": 4096,
        "mlp_hidden_act": "relu2",
        "moe_intermediate_size": 7688,
        "moe_shared_expert_intermediate_size": 7688,
        "n_group": 1,
        "n_groups": 8,
        "n_routed_experts": 8,
        "norm_topk_prob": True,
        "num_experts_per_tok": 2,
        "num_key_value_heads": 8,
        "routed_scaling_factor": 1.0,
        "ssm_state_size": 128,
        "topk_group": 1,
        "use_conv_bias": True,
    }
}
"""As in `models.families.dense`."""

_OLDER = {"mamba_n_groups": "n_groups", "mamba_d_conv": "conv_kernel", "mamba_conv_bias": "use_conv_bias"}
"""What earlier configurations call some of these fields."""
_LETTERS = {"M": "mamba", "*": "attention", "-": "mlp", "E": "moe"}
_KINDS: Mapping[str, StateKind] = {
    "mamba": "state_space",
    "linear_attention": "state_space",
    "attention": "kv",
    "full_attention": "kv",
    "mlp": "none",
    "moe": "none",
}


def nemotron_h(config: Config) -> ModelSpec:
    config = {**config, **{meant: config[name] for name, meant in _OLDER.items() if name in config}}
    names = _layer_names(config)
    for key, only in (("mlp_hidden_act", "relu2"), ("mamba_hidden_act", "silu")):
        if config.get(key, only) != only:
            raise UnsupportedModel(f"{key} {config[key]!r} is not supported in this family ({only} is)")
    spec = common({**config, "num_hidden_layers": len(names), "rms_norm_eps": config["layer_norm_epsilon"]})
    shape = StateShape(
        num_key_heads=count(config, "n_groups"),
        num_value_heads=count(config, "mamba_num_heads"),
        key_dim=count(config, "ssm_state_size"),
        value_dim=count(config, "mamba_head_dim"),
        conv_kernel=count(config, "conv_kernel"),
    )
    kinds = kinds_of(names, _KINDS, spec.num_layers)
    kept = recurrent(kinds, shape, spec.num_kv_heads)
    return replace(
        spec,
        tied=False,  # transformers has a head of its own, whatever the configuration says
        activation="relu2",
        projections=("up_proj", "down_proj"),
        mlp_bias=bool(config.get("mlp_bias", False)),
        feeds=tuple(kind == "none" for kind in kinds),
        norms=LayerNorms(before_attention="norm", before_mlp="norm"),
        rope=replace(spec.rope, kind="none"),
        recurrent=kept
        and replace(
            kept,
            conv_bias=bool(config["use_conv_bias"]),
            projection_bias=bool(config.get("use_bias", False)),
        ),
        moe=_experts(config, names) if "moe" in names else None,
        skipped_prefixes=("mtp.",),
    )


def _layer_names(config: Config) -> list[str]:
    """Return each layer's kind, which some configurations say by a letter each. Raises UnsupportedModel."""
    names = config.get("layers_block_type") or config.get("layer_types")
    if names:
        return list(names)
    pattern = config["hybrid_override_pattern"]
    if unknown := sorted(set(pattern) - set(_LETTERS)):
        raise UnsupportedModel(
            f"hybrid_override_pattern has {unknown[0]!r}, which is not supported ({', '.join(_LETTERS)} are)"
        )
    return [_LETTERS[letter] for letter in pattern]


def _experts(config: Config, names: list[str]) -> MoeSpec:
    return MoeSpec(
        num_experts=count(config, "n_routed_experts"),
        intermediate_size=count(config, "moe_intermediate_size"),
        latent_size=int(config.get("moe_latent_size") or 0),
        routing=biased_routing(config),
        sparse=tuple(name == "moe" for name in names),
        projections=("up_proj", "down_proj"),
        choice_bias=CHOICE_BIAS,
        shared_size=count(config, "moe_shared_expert_intermediate_size"),
    )
