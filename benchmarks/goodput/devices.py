"""What modelled instances are made of: GPUs, catalogued models, and models with routed experts by their config.json."""

from dataclasses import dataclass, replace
from typing import Any, Final

from sim.catalogue.catalogue import GPUS, CatalogueModel, Gpu
from sim.catalogue.model_config import model_of

GPU, MODEL = "H100", "llama-3.1-8b"

MIXTRAL: Final[dict[str, Any]] = {
    "vocab_size": 32_000,
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 14_336,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
}
"""Mixtral 8x7B, in 16 bits."""
QWEN3_30B: Final[dict[str, Any]] = {
    "vocab_size": 151_936,
    "hidden_size": 2048,
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_experts": 128,
    "num_experts_per_tok": 8,
}
"""Qwen3-30B-A3B, in 16 bits."""
GPT_OSS: Final[dict[str, Any]] = {
    "vocab_size": 201_088,
    "hidden_size": 2880,
    "num_hidden_layers": 36,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "intermediate_size": 2880,
    "num_local_experts": 128,
    "num_experts_per_tok": 4,
    "quantization_config": {"quant_method": "mxfp4"},
}
"""gpt-oss-120b, in 4 bits."""
DEEPSEEK_V3: Final[dict[str, Any]] = {
    "vocab_size": 129_280,
    "hidden_size": 7168,
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
    "intermediate_size": 18_432,
    "moe_intermediate_size": 2048,
    "n_routed_experts": 256,
    "num_experts_per_tok": 8,
    "n_shared_experts": 1,
    "first_k_dense_replace": 3,
    "quantization_config": {"quant_method": "fp8"},
}
"""DeepSeek-V3, in 8 bits."""


@dataclass(frozen=True, slots=True)
class Device:
    """What an instance is made of."""

    gpu: Gpu
    model: str = MODEL
    read: CatalogueModel | None = None
    """A model that the catalogue does not have, called `model`."""
    tp: int = 1
    host_bytes: float = 0.0
    """Host memory of an instance for KV."""


_BASE = GPUS[GPU]
_HOST_BYTES = 128e9
"""Half of the 2 TB of a usual server, divided among its eight GPUs."""
DEVICES: dict[str, Device] = {
    "base": Device(_BASE),
    "prefill/2": Device(replace(_BASE, flop_per_s=_BASE.flop_per_s / 2)),
    "prefill*2": Device(replace(_BASE, flop_per_s=_BASE.flop_per_s * 2)),
    "memory/2": Device(replace(_BASE, memory_bytes_per_s=_BASE.memory_bytes_per_s / 2)),
    "memory*2": Device(replace(_BASE, memory_bytes_per_s=_BASE.memory_bytes_per_s * 2)),
    "link/4": Device(replace(_BASE, nic_bytes_per_s=_BASE.nic_bytes_per_s / 4)),
    "link 1 GB/s": Device(replace(_BASE, nic_bytes_per_s=1e9)),
    "base+host": Device(_BASE, host_bytes=_HOST_BYTES),
    "memory/2+host": Device(
        replace(_BASE, memory_bytes_per_s=_BASE.memory_bytes_per_s / 2), host_bytes=_HOST_BYTES
    ),
    "memory*2+host": Device(
        replace(_BASE, memory_bytes_per_s=_BASE.memory_bytes_per_s * 2), host_bytes=_HOST_BYTES
    ),
    "A100+host": Device(GPUS["A100"], host_bytes=_HOST_BYTES),
    "L40S+host": Device(GPUS["L40S"], host_bytes=_HOST_BYTES),
    "70B on 4+host": Device(_BASE, "llama-3.1-70b", tp=4, host_bytes=4 * _HOST_BYTES),
    "A100": Device(GPUS["A100"]),
    "L40S": Device(GPUS["L40S"]),
    "70B on 4": Device(_BASE, "llama-3.1-70b", tp=4),
    "MoE on 8": Device(GPUS["H200"], "DeepSeek-V3", model_of(DEEPSEEK_V3), tp=8),
    "Mixtral on 2": Device(_BASE, "Mixtral-8x7B", model_of(MIXTRAL), tp=2),
    "Qwen3-30B": Device(_BASE, "Qwen3-30B-A3B", model_of(QWEN3_30B)),
    "gpt-oss-120b": Device(_BASE, "gpt-oss-120b", model_of(GPT_OSS)),
}
