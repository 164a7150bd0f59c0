"""What tiny configurations of all families have alike."""

import random
from typing import Any

VOCAB = 61
CONTEXT = 128


def rope(rng: random.Random, kind: str) -> dict[str, Any]:
    theta = rng.choice((10000.0, 500000.0))
    extra: dict[str, Any] = {
        "default": {},
        "linear": {"factor": 4.0},
        "dynamic": {"factor": 2.0},
        "llama3": {
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 32,
        },
        "yarn": {"factor": 4.0, "original_max_position_embeddings": 32},
    }[kind]
    return {"rope_type": kind, "rope_theta": theta, **extra}


def common(rng: random.Random) -> dict[str, Any]:
    kv_heads = rng.choice((1, 2))
    heads = kv_heads * rng.choice((1, 2, 3))
    return {
        "vocab_size": VOCAB,
        "hidden_size": heads * rng.choice((8, 12)),
        "intermediate_size": rng.choice((40, 64)),
        "num_hidden_layers": rng.choice((2, 3)),
        "num_key_value_heads": kv_heads,
        "num_attention_heads": heads,
        "head_dim": rng.choice((8, 16)),
        "max_position_embeddings": CONTEXT,
        "tie_word_embeddings": rng.random() < 0.5,
        "rms_norm_eps": rng.choice((1e-5, 1e-6)),
        "eos_token_id": 1,
        "bos_token_id": 0,
        "pad_token_id": None,
    }


ROPES = ("default", "yarn", "llama3", "linear", "dynamic", "llama3", "yarn")


def qwen_experts(rng: random.Random, i: int) -> dict[str, Any]:
    return {
        **common(rng),
        "rope_parameters": rope(rng, ROPES[i]),
        "num_experts": rng.choice((4, 9)),
        "num_experts_per_tok": rng.choice((1, 4)),
        "moe_intermediate_size": 24,
        "norm_topk_prob": i % 2 == 0,
        **({}, {"mlp_only_layers": [1]}, {"decoder_sparse_step": 2})[i % 3],
    }


def deepseek(rng: random.Random, i: int) -> dict[str, Any]:
    """Latent attention and experts, as DeepSeek's models have them."""
    fields = common(rng)
    fields.pop("head_dim")
    fields["num_key_value_heads"] = fields["num_attention_heads"]
    parameters = rope(rng, ROPES[i])
    if parameters["rope_type"] == "yarn":
        parameters |= {"mscale": 0.8, "mscale_all_dim": 1.2}
    return {
        **fields,
        "rope_parameters": parameters,
        "attention_bias": i % 2 == 1,
        "q_lora_rank": (None, 12)[i % 2],
        "kv_lora_rank": 16,
        "qk_nope_head_dim": 12,
        "qk_rope_head_dim": 8,
        "v_head_dim": (8, 12)[i // 2 % 2],
        "num_experts_per_tok": 3,
        "n_routed_experts": 8,
        "n_shared_experts": 1 + i % 2,
        "moe_intermediate_size": 16,
        "first_k_dense_replace": i % 3,
        "routed_scaling_factor": 1.5,
    }
