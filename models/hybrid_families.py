"""Families in which some layers keep a recurrent state in place of keys and values."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from core.errors import UnsupportedModel
from kernels.states import StateShape
from models.config_fields import Config, common, count
from models.expert_families import qwen_experts
from models.recurrent_spec import RecurrentSpec, StateKind
from models.spec import ModelSpec

DEFAULTS: dict[str, dict[str, Any]] = {
    "Qwen3NextForCausalLM": {
        "head_dim": 256,
        "num_key_value_heads": 2,
        "partial_rotary_factor": 0.25,
        "full_attention_interval": 4,
        "decoder_sparse_step": 1,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
        "num_experts": 512,
        "num_experts_per_tok": 10,
        "norm_topk_prob": True,
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
    },
}
"""As in `dense_families`."""

_QWEN_KINDS: Mapping[str, StateKind] = {"full_attention": "kv", "linear_attention": "gated_delta"}


def qwen3_next(config: Config) -> ModelSpec:
    rope = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    fraction = float(rope.pop("partial_rotary_factor", config["partial_rotary_factor"]))
    spec = common({**config, "rope_parameters": rope, "partial_rotary_factor": 1.0})
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
    moe = replace(
        qwen_experts(config),
        shared_size=count(config, "shared_expert_intermediate_size"),
        shared_name="shared_expert",
        shared_gate=True,
    )
    bias = bool(config.get("attention_bias", False))
    return replace(
        spec,
        recurrent=recurrent(kinds_of(names, _QWEN_KINDS, spec.num_layers), shape),
        moe=moe if any(moe.sparse) else None,
        qkv_bias=bias,
        out_bias=bias,
        unit_offset_norm=True,
        attention_gate=True,
        rotary_dim=int(spec.head_dim * fraction),
        skipped_prefixes=("mtp.",),
    )


def kinds_of(names: list[str], known: Mapping[str, StateKind], num_layers: int) -> tuple[StateKind, ...]:
    """Return what each layer keeps. Raises UnsupportedModel."""
    if unknown := sorted(set(names) - set(known)):
        raise UnsupportedModel(f"layer type {unknown[0]!r} is not supported ({', '.join(known)} are)")
    if len(names) != num_layers:
        raise UnsupportedModel(f"layer_types has {len(names)} entries for {num_layers} num_hidden_layers")
    return tuple(known[name] for name in names)


def recurrent(kinds: tuple[StateKind, ...], shape: StateShape) -> RecurrentSpec | None:
    """Return what the layers keep; None where all keep keys and values. Raises UnsupportedModel."""
    if "kv" not in kinds:
        raise UnsupportedModel("no layer attends: a model without keys and values is not supported")
    if shape.num_value_heads % shape.num_key_heads:
        raise UnsupportedModel(
            f"{shape.num_value_heads} value heads of recurrent layers are no multiple of {shape.num_key_heads} key heads"
        )
    return RecurrentSpec(kinds=kinds, shape=shape) if set(kinds) != {"kv"} else None
