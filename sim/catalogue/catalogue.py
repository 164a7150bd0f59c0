"""GPUs and models by name, and the roofline step cost of one on the other.

Dense bf16 peaks and bandwidths are the vendors' figures. Roofline: 2 FLOP per weight and token and those of causal attention,
all weights and the batch's KV read once a step, and its recurrent states read and written. A tensor-parallel group divides both
and adds two all-reduces a layer (ring, over the scale-up network). A pipeline's stages are such groups, one behind the other over
the network cards. Assumed: 0.6 of the peak FLOP rate, 0.8 of the memory bandwidth, and 2 ms a step. An H200 was quicker with one
model (`benchmarks/results/simulator.md`).

Prices are dollars an hour on demand in May 2026: the median of offers for the H100, the middle of the range for A100 and H200;
L40S and B200 are put at the H100's price for each byte per second of memory bandwidth."""

from dataclasses import dataclass, replace
from math import ceil

from core.cost.memory_model import DeviceMemory, RankNeeds, Sharing, check_fit, kv_room
from sim.catalogue.cost import LinkCost, StepCost

FLOP_EFFICIENCY, BANDWIDTH_EFFICIENCY, MEMORY_SHARE = 0.6, 0.8, 0.9
_BYTES_PER_VALUE = 2
_OVERHEAD_S = 0.002
_REDUCE_LATENCY_S = 5e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    flop_per_s: float
    memory_bytes: float
    memory_bytes_per_s: float
    nic_bytes_per_s: float
    scale_up_bytes_per_s: float
    dollars_per_h: float
    host_bytes_per_s: float = 25e9
    """What a copy from host memory reaches: about 0.8 of what PCIe 4.0 with 16 lanes can."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CatalogueModel:
    num_weights: float
    """The weights that every token uses: all but routed experts."""
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    hidden_size: int
    weight_bytes: float = 0.0
    """Their bytes; 0: 16 bits each."""
    num_expert_weights: float = 0.0
    """The weights of routed experts. `expert_weight_bytes` are their bytes, and a token uses `expert_share` of them."""
    expert_weight_bytes: float = 0.0
    expert_share: float = 0.0
    kv_token_values: int = 0
    """Values kept for one token, all layers; 0: keys and values of every layer."""
    pair_values: int = 0
    """Multiplications between one query and one key, all layers and heads; 0: as keys and values are kept."""
    chosen_tokens: int = 0
    """How many tokens a query attends to at the most, where it chooses them by scores; 0: to all."""
    chosen_values: int = 0
    """Values of one token that attention reads where it is chosen, all layers."""
    index_values: int = 0
    """Values of one token that scoring reads, all layers."""
    index_pair_values: int = 0
    """Multiplications by which one query scores one token, all layers."""
    adapter_bytes: float = 0.0
    """What adapters take beside the weights, in each instance."""
    state_bytes: float = 0.0
    """What recurrent layers keep of a sequence, however long it is. A step reads and writes it."""

    @property
    def pair_flop(self) -> int:
        """Operations of attention between one query and one key position: scores and values, all layers and heads."""
        return 2 * self.pair_values or 4 * self.num_layers * self.num_heads * self.head_dim

    @property
    def kv_token_bytes(self) -> int:
        values = self.kv_token_values or 2 * self.num_layers * self.num_kv_heads * self.head_dim
        return values * _BYTES_PER_VALUE

    @property
    def common_bytes(self) -> float:
        """Bytes of the weights that every token uses."""
        return self.weight_bytes or self.num_weights * _BYTES_PER_VALUE

    @property
    def total_bytes(self) -> float:
        """What lies in an instance's memory before any KV."""
        return self.common_bytes + self.expert_weight_bytes + self.adapter_bytes

    def state_blocks(self, block_size: int) -> int:
        """Return the KV blocks that a sequence's recurrent state takes."""
        return ceil(self.state_bytes / (self.kv_token_bytes * block_size))

    @property
    def active_weights(self) -> float:
        """The number of weights that one token is multiplied with."""
        return self.num_weights + self.num_expert_weights * self.expert_share


GPUS = {
    "H100": Gpu(
        flop_per_s=989e12,
        memory_bytes=80e9,
        memory_bytes_per_s=3350e9,
        nic_bytes_per_s=50e9,
        scale_up_bytes_per_s=450e9,
        dollars_per_h=2.95,
        host_bytes_per_s=50e9,
    ),
    "H200": Gpu(
        flop_per_s=989e12,
        memory_bytes=141e9,
        memory_bytes_per_s=4800e9,
        nic_bytes_per_s=50e9,
        scale_up_bytes_per_s=450e9,
        dollars_per_h=4.75,
        host_bytes_per_s=50e9,
    ),
    "A100": Gpu(
        flop_per_s=312e12,
        memory_bytes=80e9,
        memory_bytes_per_s=2039e9,
        nic_bytes_per_s=25e9,
        scale_up_bytes_per_s=300e9,
        dollars_per_h=1.90,
    ),
    "L40S": Gpu(
        flop_per_s=362e12,
        memory_bytes=48e9,
        memory_bytes_per_s=864e9,
        nic_bytes_per_s=50e9,
        scale_up_bytes_per_s=32e9,
        dollars_per_h=0.76,
    ),
    "B200": Gpu(
        flop_per_s=2250e12,
        memory_bytes=180e9,
        memory_bytes_per_s=7700e9,
        nic_bytes_per_s=100e9,
        scale_up_bytes_per_s=900e9,
        dollars_per_h=6.78,
        host_bytes_per_s=50e9,
    ),
}
MODELS = {
    "llama-3.1-8b": CatalogueModel(
        num_weights=8.03e9, num_layers=32, num_heads=32, num_kv_heads=8, head_dim=128, hidden_size=4096
    ),
    "llama-3.1-70b": CatalogueModel(
        num_weights=70.6e9, num_layers=80, num_heads=64, num_kv_heads=8, head_dim=128, hidden_size=8192
    ),
}


def step_cost(gpu: Gpu, model: CatalogueModel, tp: int = 1, pp: int = 1) -> StepCost:
    """Return the step cost of one instance of `pp` stages of `tp` GPUs each. Products are in bf16, however weights are stored."""
    bandwidth = gpu.memory_bytes_per_s * BANDWIDTH_EFFICIENCY * tp
    flop_per_s = gpu.flop_per_s * FLOP_EFFICIENCY * tp
    num_reduces = 2 * model.num_layers if tp > 1 else 0
    reduced_bytes = 2 * (tp - 1) / tp * model.hidden_size * _BYTES_PER_VALUE
    token_s = 2 * model.active_weights / flop_per_s + num_reduces * reduced_bytes / gpu.scale_up_bytes_per_s
    cost = StepCost(
        overhead_s=_OVERHEAD_S + num_reduces * _REDUCE_LATENCY_S,
        tokens_per_s=1 / token_s,
        weights_read_s=model.common_bytes / bandwidth,
        experts_read_s=model.expert_weight_bytes / bandwidth,
        expert_share=model.expert_share,
        kv_token_read_s=model.kv_token_bytes / bandwidth,
        state_s=2 * model.state_bytes / bandwidth,
        pair_s=model.pair_flop / flop_per_s,
        stages=pp,
        hop=link_cost(gpu, tp),
        hop_token_bytes=model.hidden_size * _BYTES_PER_VALUE,
    )
    return _choosing(cost, model)


def _choosing(cost: StepCost, model: CatalogueModel) -> StepCost:
    """Return the cost where queries choose tokens: scoring all of them, and attending to those that are chosen."""
    if not model.chosen_tokens:
        return cost
    read_s = cost.kv_token_read_s / model.kv_token_values
    pair_s = 2 * cost.pair_s / model.pair_flop
    return replace(
        cost,
        kv_token_read_s=read_s * model.index_values,
        pair_s=pair_s * model.index_pair_values,
        chosen_tokens=model.chosen_tokens,
        chosen_read_s=read_s * model.chosen_values,
        chosen_pair_s=cost.pair_s,
    )


def link_cost(gpu: Gpu, num_gpus: int = 1) -> LinkCost:
    """Return the link of an instance whose GPUs have a network card each."""
    return LinkCost(bytes_per_s=gpu.nic_bytes_per_s * num_gpus)


def num_blocks(
    gpu: Gpu, model: CatalogueModel, block_size: int, num_gpus: int = 1, card_share: float = 1.0
) -> int:
    """Return the KV blocks of `num_gpus` ranks that share weights and adapters evenly, each with `card_share` of its card. Raises
    ConfigError when the weights do not fit."""
    size = int(gpu.memory_bytes)
    memory = DeviceMemory(name="one GPU", total_bytes=size, free_bytes=size, is_host=False)
    weight_bytes = int(model.total_bytes / num_gpus)
    needs = RankNeeds(weight_bytes=weight_bytes, step_bytes=0)
    block_bytes = model.kv_token_bytes * block_size
    sharing = Sharing(card_share=card_share)
    blocks = kv_room(memory, needs, MEMORY_SHARE, sharing) * num_gpus // block_bytes
    least = model.state_blocks(block_size) + 1
    if blocks < least:
        check_fit(memory, needs, -(-least * block_bytes // num_gpus), MEMORY_SHARE, sharing)
    return blocks
