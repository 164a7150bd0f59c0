"""What the recurrent layers of a hybrid model weigh, and what they keep of a sequence: gated delta nets as Qwen3-Next has them,
delta attention as Kimi-Linear has it, state spaces as Granite 4 H and Nemotron-H have them."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kernels.states import FLOAT_BYTES, StateShape


@dataclass(frozen=True, slots=True)
class RecurrentLayer:
    """One of them; all of a model are alike."""

    num_weights: int
    state_bytes: int
    """What it keeps of a sequence, however long that is."""


def recurrent_layer(config: Mapping[str, Any], hidden: int) -> RecurrentLayer:
    """Raises KeyError for a size that is not there."""
    if (by_channels := _delta_attention(config)) is not None:
        dim, inner = by_channels.value_dim, by_channels.value_size
        weights = hidden * (4 * inner + 2 * dim + by_channels.num_value_heads) + 2 * dim * inner
        weights += by_channels.conv_channels * by_channels.conv_kernel
        return RecurrentLayer(weights, by_channels.num_floats * FLOAT_BYTES)
    is_delta = "linear_num_value_heads" in config
    shape = _delta_net(config) if is_delta else _state_space(config, hidden)
    num_gates = (2 if is_delta else 1) * shape.num_value_heads
    projected = shape.conv_channels + shape.value_size + num_gates
    weights = hidden * (projected + shape.value_size) + shape.conv_channels * shape.conv_kernel
    return RecurrentLayer(weights, shape.num_floats * FLOAT_BYTES)


def _delta_net(config: Mapping[str, Any]) -> StateShape:
    return StateShape(
        num_key_heads=config["linear_num_key_heads"],
        num_value_heads=config["linear_num_value_heads"],
        key_dim=config["linear_key_head_dim"],
        value_dim=config["linear_value_head_dim"],
        conv_kernel=config["linear_conv_kernel_dim"],
    )


def _delta_attention(config: Mapping[str, Any]) -> StateShape | None:
    """Return the state of Kimi-Linear's layers; None for other models."""
    own: Mapping[str, Any] = config.get("linear_attn_config") or {}
    heads, dim = (
        own.get("num_heads", config.get("linear_num_heads")),
        own.get("head_dim", config.get("linear_head_dim")),
    )
    if not heads or not dim:
        return None
    kernel = own.get("short_conv_kernel_size", config.get("linear_conv_kernel_dim", 4))
    return StateShape(
        num_key_heads=heads, num_value_heads=heads, key_dim=dim, value_dim=dim, conv_kernel=kernel
    )


def _state_space(config: Mapping[str, Any], hidden: int) -> StateShape:
    if "mamba_num_heads" in config:
        return StateShape(
            num_key_heads=config["n_groups"],
            num_value_heads=config["mamba_num_heads"],
            key_dim=config["ssm_state_size"],
            value_dim=config["mamba_head_dim"],
            conv_kernel=config["conv_kernel"],
        )
    heads = config["mamba_n_heads"]
    return StateShape(
        num_key_heads=config["mamba_n_groups"],
        num_value_heads=heads,
        key_dim=config["mamba_d_state"],
        value_dim=config["mamba_expand"] * hidden // heads,
        conv_kernel=config["mamba_d_conv"],
    )
