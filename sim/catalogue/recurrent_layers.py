"""What the recurrent layers of a hybrid model weigh, and what they keep of a sequence: gated delta nets as Qwen3-Next has them,
state spaces as Granite 4 H has them."""

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


def _state_space(config: Mapping[str, Any], hidden: int) -> StateShape:
    heads = config["mamba_n_heads"]
    return StateShape(
        num_key_heads=config["mamba_n_groups"],
        num_value_heads=heads,
        key_dim=config["mamba_d_state"],
        value_dim=config["mamba_expand"] * hidden // heads,
        conv_kernel=config["mamba_d_conv"],
    )
