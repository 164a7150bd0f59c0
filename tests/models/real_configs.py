"""The sizes of published models, as their config.json says them."""

import json
from pathlib import Path
from typing import Any

_LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "torch_dtype": "bfloat16",
    "vocab_size": 128256,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
}
_QWEN3: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "torch_dtype": "bfloat16",
    "vocab_size": 151936,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "tie_word_embeddings": False,
}


def _sizes(hidden: int, inner: int, layers: int, heads: int) -> dict[str, int]:
    return {
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
    }


REAL: dict[str, dict[str, Any]] = {
    "meta-llama/Llama-3.1-8B-Instruct": {**_LLAMA, **_sizes(4096, 14336, 32, 32)},
    "meta-llama/Llama-3.3-70B-Instruct": {**_LLAMA, **_sizes(8192, 28672, 80, 64)},
    "/models/mistral": {
        **_LLAMA,
        **_sizes(4096, 14336, 32, 32),
        "architectures": ["MistralForCausalLM"],
        "model_type": "mistral",
        "vocab_size": 32768,
        "max_position_embeddings": 32768,
        "sliding_window": None,
    },
    "Qwen/Qwen2.5-0.5B-Instruct": {
        **_QWEN3,
        **_sizes(896, 4864, 24, 14),
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "num_key_value_heads": 2,
        "head_dim": 64,
        "max_position_embeddings": 32768,
        "tie_word_embeddings": True,
    },
    "Qwen/Qwen3-0.6B": {**_QWEN3, **_sizes(1024, 3072, 28, 16), "tie_word_embeddings": True},
    "Qwen/Qwen3-8B": {**_QWEN3, **_sizes(4096, 12288, 36, 32)},
    "Qwen/Qwen3-32B": {**_QWEN3, **_sizes(5120, 25600, 64, 64)},
    "Qwen/Qwen3-235B-A22B": {
        **_QWEN3,
        **_sizes(4096, 12288, 94, 64),
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "num_key_value_heads": 4,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 1536,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    },
    "mistralai/Mixtral-8x7B-v0.1": {
        **_LLAMA,
        **_sizes(4096, 14336, 32, 32),
        "architectures": ["MixtralForCausalLM"],
        "model_type": "mixtral",
        "vocab_size": 32000,
        "max_position_embeddings": 32768,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "sliding_window": None,
    },
    "deepseek-ai/DeepSeek-V3": {
        **_sizes(7168, 18432, 61, 128),
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v3",
        "torch_dtype": "bfloat16",
        "vocab_size": 129280,
        "num_key_value_heads": 128,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "q_lora_rank": 1536,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "moe_intermediate_size": 2048,
        "n_routed_experts": 256,
        "n_shared_experts": 1,
        "num_experts_per_tok": 8,
        "n_group": 8,
        "topk_group": 4,
        "routed_scaling_factor": 2.5,
        "norm_topk_prob": True,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "first_k_dense_replace": 3,
        "hidden_act": "silu",
    },
    "ibm-granite/granite-4.0-h-tiny": {
        **_sizes(1536, 512, 40, 12),
        "architectures": ["GraniteMoeHybridForCausalLM"],
        "model_type": "granitemoehybrid",
        "torch_dtype": "bfloat16",
        "vocab_size": 100352,
        "num_key_value_heads": 4,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": True,
        "position_embedding_type": "nope",
        "layer_types": ["attention" if layer % 10 == 5 else "mamba" for layer in range(40)],
        "attention_multiplier": 0.0078125,
        "embedding_multiplier": 12,
        "residual_multiplier": 0.22,
        "logits_scaling": 6,
        "num_local_experts": 64,
        "num_experts_per_tok": 6,
        "shared_intermediate_size": 1024,
        "mamba_n_heads": 48,
        "mamba_n_groups": 1,
        "mamba_d_state": 128,
        "mamba_d_head": 64,
        "mamba_d_conv": 4,
        "mamba_expand": 2,
        "mamba_conv_bias": True,
        "mamba_proj_bias": False,
    },
}


def write_config(folder: Path, name: str) -> Path:
    """A model's folder without a weight."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(REAL[name]))
    return folder
