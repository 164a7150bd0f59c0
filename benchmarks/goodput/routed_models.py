"""Sizes of models with routed experts, by the names of their config.json."""

from typing import Any, Final

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
