"""Families in which some layers keep a recurrent state in place of keys and values."""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from core.errors import UnsupportedModel
from kernels.states import StateShape
from models.families.experts import granite_experts, qwen_experts
from models.spec.config_fields import Config, common, count, multipliers, partly_rotated
from models.spec.model_spec import ModelSpec, MoeSpec
from models.spec.recurrent_spec import RecurrentSpec, StateKind

_QWEN: dict[str, Any] = {
    "head_dim": 256,
    "num_key_value_heads": 4,
    "full_attention_interval": 4,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
}
_QWEN_SPARSE: dict[str, Any] = {
    **_QWEN,
    "num_key_value_heads": 2,
    "decoder_sparse_step": 1,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
    "norm_topk_prob": True,
}
DEFAULTS: dict[str, dict[str, Any]] = {
    "Qwen3NextForCausalLM": {**_QWEN_SPARSE, "num_experts": 512, "num_experts_per_tok": 10},
    "Qwen3_5ForCausalLM": _QWEN,
    "Qwen3_5MoeForCausalLM": {
        **_QWEN_SPARSE,
        "intermediate_size": 512,
        "num_experts": 256,
        "num_experts_per_tok": 8,
    },
    "GraniteMoeHybridForCausalLM": {
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "shared_intermediate_size": 1024,
        "mamba_n_heads": 128,
        "mamba_n_groups": 1,
        "mamba_d_state": 256,
        "mamba_d_head": "auto",
        "mamba_d_conv": 4,
        "mamba_expand": 2,
        "mamba_conv_bias": True,
    },
}
"""As in `models.families.dense`."""

_QWEN_KINDS: Mapping[str, StateKind] = {"full_attention": "kv", "linear_attention": "gated_delta"}
_GRANITE_KINDS: Mapping[str, StateKind] = {
    "attention": "kv",
    "full_attention": "kv",
    "mamba": "state_space",
    "linear_attention": "state_space",
}


def qwen3_next(config: Config) -> ModelSpec:
    """Return the model. A GGUF file's projections are by kind, as Qwen3.5's are, but for the oldest."""
    by_kind = bool(config.get("projections_by_kind", False))
    return replace(_qwen(config, by_kind=by_kind), moe=_qwen_experts(config))


def qwen3_5(config: Config) -> ModelSpec:
    return _qwen(config, by_kind=True)


def qwen3_5_moe(config: Config) -> ModelSpec:
    """Return the model with experts. transformers knows no dense layer in it, and no weights that are not renormalised."""
    plain = {**config, "mlp_only_layers": (), "decoder_sparse_step": 1, "norm_topk_prob": True}
    return replace(_qwen(config, by_kind=True), moe=_qwen_experts(plain))


def _qwen_experts(config: Config) -> MoeSpec | None:
    shared = count(config, "shared_expert_intermediate_size")
    moe = qwen_experts(config)
    return (
        replace(moe, shared_size=shared, shared_name="mlp.shared_expert", shared_gate=True)
        if any(moe.sparse)
        else None
    )


def _qwen(config: Config, *, by_kind: bool) -> ModelSpec:
    """Return the model without experts. `by_kind`: see `RecurrentSpec`."""
    spec = partly_rotated(config, 0.25)
    if not config.get("attn_output_gate", True):
        raise UnsupportedModel(
            "attn_output_gate is false in config.json: in this family attention has a gate"
        )
    interval = count(config, "full_attention_interval")
    names = config.get("layer_types") or [
        "linear_attention" if (layer + 1) % interval else "full_attention" for layer in range(spec.num_layers)
    ]
    shape = StateShape(
        num_key_heads=count(config, "linear_num_key_heads"),
        num_value_heads=count(config, "linear_num_value_heads"),
        key_dim=count(config, "linear_key_head_dim"),
        value_dim=count(config, "linear_value_head_dim"),
        conv_kernel=count(config, "linear_conv_kernel_dim"),
    )
    bias = bool(config.get("attention_bias", False))
    kept = recurrent(kinds_of(names, _QWEN_KINDS, spec.num_layers), shape, spec.num_kv_heads)
    return replace(
        spec,
        recurrent=kept and replace(kept, by_kind=by_kind),
        qkv_bias=bias,
        out_bias=bias,
        unit_offset_norm=True,
        attention_gate=True,
        mtp_layers=("mtp.layers.0.",),
        skipped_prefixes=("mtp.",),
    )


def granite_hybrid(config: Config) -> ModelSpec:
    spec = common(config)
    if spec.activation != "silu":
        raise UnsupportedModel(
            f"hidden_act {config['hidden_act']!r} is not supported in this family (silu is)"
        )
    names = config.get("layer_types") or ["mamba"] * spec.num_layers
    bias = bool(config.get("attention_bias", False))
    shared = count(config, "shared_intermediate_size")
    moe = replace(granite_experts(config, spec), shared_size=shared, shared_name="shared_mlp")
    kinds = kinds_of(names, _GRANITE_KINDS, spec.num_layers)
    kept = recurrent(kinds, _state_space(config, spec), spec.num_kv_heads)
    biases = {"conv_bias": bool(config["mamba_conv_bias"])}
    biases["projection_bias"] = bool(config.get("mamba_proj_bias", False))
    return replace(
        spec,
        rope=spec.rope
        if config.get("position_embedding_type") == "rope"
        else replace(spec.rope, kind="none"),
        recurrent=kept and replace(kept, **biases),
        moe=moe if moe.num_experts else None,
        intermediate_size=shared,
        mlp_name="shared_mlp",
        projections=tuple(config.get("shared_mlp_projections") or ("input_linear", "output_linear")),
        qkv_bias=bias,
        out_bias=bias,
        **multipliers(config),
    )


def _state_space(config: Config, spec: ModelSpec) -> StateShape:
    heads, inner = count(config, "mamba_n_heads"), count(config, "mamba_expand") * spec.hidden_size
    value_dim = inner // heads if config["mamba_d_head"] == "auto" else count(config, "mamba_d_head")
    if heads * value_dim != inner:
        raise UnsupportedModel(
            f"mamba_n_heads {heads} times mamba_d_head {value_dim} is not mamba_expand times hidden_size, {inner}"
        )
    limits = config.get("time_step_limit") or (0.0, "Infinity")
    if float(limits[0]) > 0 or _bound(limits[1]) != math.inf:
        raise UnsupportedModel(f"time_step_limit {limits} is not supported (only 0 to infinity is)")
    return StateShape(
        num_key_heads=count(config, "mamba_n_groups"),
        num_value_heads=heads,
        key_dim=count(config, "mamba_d_state"),
        value_dim=value_dim,
        conv_kernel=count(config, "mamba_d_conv"),
    )


def _bound(value: Any) -> float:
    """Transformers writes infinity as an object, since JSON has none."""
    return float(value["__float__"] if isinstance(value, dict) else value)


def kinds_of(names: list[str], known: Mapping[str, StateKind], num_layers: int) -> tuple[StateKind, ...]:
    """Return what each layer keeps. Raises UnsupportedModel."""
    if unknown := sorted(set(names) - set(known)):
        raise UnsupportedModel(f"layer type {unknown[0]!r} is not supported ({', '.join(known)} are)")
    if len(names) != num_layers:
        raise UnsupportedModel(f"layer_types has {len(names)} entries for {num_layers} num_hidden_layers")
    return tuple(known[name] for name in names)


def recurrent(kinds: tuple[StateKind, ...], shape: StateShape, num_kv_heads: int) -> RecurrentSpec | None:
    """Return what the layers keep; None where all keep keys and values. Raises UnsupportedModel."""
    if "kv" not in kinds:
        raise UnsupportedModel("no layer attends: a model without keys and values is not supported")
    if shape.num_value_heads % shape.num_key_heads:
        raise UnsupportedModel(
            f"{shape.num_value_heads} value heads of recurrent layers are no multiple of {shape.num_key_heads} key heads"
        )
    if set(kinds) == {"kv"}:
        return None
    return RecurrentSpec(
        kinds=kinds, shape=shape, num_parts=num_kv_heads if shape.can_have(num_kv_heads) else 1
    )
