"""GPUs and models by name, and the roofline step cost of one on the other. Pure.

Dense bf16 peaks and bandwidths are the vendors' figures. Roofline: 2 FLOP per weight and token and those of causal attention,
all weights and the batch's KV read once a step.
Two assumptions, neither measured here: 0.6 of the peak FLOP rate, 0.8 of the memory bandwidth."""

from dataclasses import dataclass

from core.errors import ConfigError
from sim.cost import LinkCost, StepCost

FLOP_EFFICIENCY, BANDWIDTH_EFFICIENCY, MEMORY_SHARE = 0.6, 0.8, 0.9
_BYTES_PER_VALUE = 2
_OVERHEAD_S = 0.002


@dataclass(frozen=True, slots=True)
class Gpu:
    flop_per_s: float
    memory_bytes: float
    memory_bytes_per_s: float
    nic_bytes_per_s: float


@dataclass(frozen=True, slots=True)
class Model:
    num_weights: float
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int

    @property
    def pair_flop(self) -> int:
        """Of attention between one query and one key position: scores and values, all layers and heads."""
        return 4 * self.num_layers * self.num_heads * self.head_dim

    @property
    def kv_token_bytes(self) -> int:
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * _BYTES_PER_VALUE


GPUS = {
    "H100": Gpu(989e12, 80e9, 3350e9, 50e9),
    "H200": Gpu(989e12, 141e9, 4800e9, 50e9),
    "A100": Gpu(312e12, 80e9, 2039e9, 25e9),
    "L40S": Gpu(362e12, 48e9, 864e9, 50e9),
    "B200": Gpu(2250e12, 180e9, 7700e9, 100e9),
}
MODELS = {"llama-3.1-8b": Model(8.03e9, 32, 32, 8, 128), "llama-3.1-70b": Model(70.6e9, 80, 64, 8, 128)}


def step_cost(gpu: Gpu, model: Model) -> StepCost:
    """Of one instance that is one GPU, in bf16."""
    bandwidth = gpu.memory_bytes_per_s * BANDWIDTH_EFFICIENCY
    return StepCost(
        _OVERHEAD_S,
        gpu.flop_per_s * FLOP_EFFICIENCY / (2 * model.num_weights),
        model.num_weights * _BYTES_PER_VALUE / bandwidth,
        model.kv_token_bytes / bandwidth,
        model.pair_flop / (gpu.flop_per_s * FLOP_EFFICIENCY),
    )


def link_cost(gpu: Gpu) -> LinkCost:
    return LinkCost(bytes_per_s=gpu.nic_bytes_per_s)


def num_blocks(gpu: Gpu, model: Model, block_size: int) -> int:
    """KV blocks beside the weights. Raises ConfigError when the weights do not fit one GPU."""
    room = gpu.memory_bytes * MEMORY_SHARE - model.num_weights * _BYTES_PER_VALUE
    blocks = int(room // (model.kv_token_bytes * block_size))
    if blocks < 1:
        raise ConfigError(
            f"the model needs {model.num_weights * _BYTES_PER_VALUE / 1e9:.0f} GB for its bf16 weights; "
            f"{MEMORY_SHARE:.0%} of this GPU is {gpu.memory_bytes * MEMORY_SHARE / 1e9:.0f} GB: choose a larger GPU"
        )
    return blocks
