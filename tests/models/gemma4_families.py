"""Tiny configurations of Gemma 4: dense, with experts beside the dense block, and with what E2B and E4B have."""

import random
from typing import Any

import transformers

from tests.models.config_parts import common


def gemma4(rng: random.Random, i: int) -> Any:
    """Published ones are like the first: two full layers share a layer of the pool."""
    return transformers.Gemma4TextConfig(**fields(rng, i))


def gemma4_moe(rng: random.Random, i: int) -> Any:
    return transformers.Gemma4TextConfig(
        **fields(rng, i),
        enable_moe_block=True,
        num_experts=(8, 4)[i % 2],
        top_k_experts=rng.choice((1, 3)),
        moe_intermediate_size=16,
    )


def gemma4_small(rng: random.Random, i: int) -> Any:
    """Published ones are like the first two: two sliding layers share a layer of the pool."""
    own = fields(rng, i)
    kinds = ["sliding_attention", "sliding_attention", "full_attention"]
    own |= {
        "num_key_value_heads": 2 if i == 0 else 1,
        "num_global_key_value_heads": None,
        "attention_k_eq_v": i == 3,
        "hidden_size_per_layer_input": (8, 12)[i % 2],
        "vocab_size_per_layer_input": own["vocab_size"] + 3 * (i == 4),
        "num_kv_shared_layers": (3, 3, 0, 2, 1, 6)[i],
        "use_double_wide_mlp": i != 4,
        "num_hidden_layers": 9 if i == 5 else 6,
        "layer_types": kinds * (3 if i == 5 else 2),
    }
    return transformers.Gemma4TextConfig(**own)


def fields(rng: random.Random, i: int) -> dict[str, Any]:
    own = common(rng)
    kv_heads = (8, 4, 2, 4, 2, 6)[i]
    own |= {
        "num_key_value_heads": kv_heads,
        "num_attention_heads": kv_heads * rng.choice((1, 2)),
        "num_hidden_layers": (7, 4, 3, 5, 3, 4)[i],
        "hidden_size": 48,
        "head_dim": (8, 8, 8, 16, 16, 8)[i],
        "global_head_dim": (16, 16, 16, 8, 16, 24)[i],
        "num_global_key_value_heads": (2, 2, None, 2, 1, 2)[i],
        "tie_word_embeddings": i != 4,
    }
    kinds = ["full_attention", "sliding_attention"] * 3
    shares = (0.25, 0.5, 1.0, 0.25, 0.25, 0.75)
    full = {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": shares[i]}
    return {
        **own,
        "attention_k_eq_v": i != 2,
        "sliding_window": rng.choice((6, 16)),
        "layer_types": None if i == 0 else kinds[: own["num_hidden_layers"]],
        "hidden_size_per_layer_input": 0,
        "final_logit_softcapping": (7.0, None)[i % 2],
        "attention_bias": i == 3,
        "rope_parameters": {
            "full_attention": full if i != 4 else {"rope_type": "default", "rope_theta": 1e5},
            "sliding_attention": {"rope_type": "default", "rope_theta": rng.choice((1000.0, 20000.0))},
        },
    }


def awkward_gemma4(family: str) -> Any:
    """Return one that four ranks can share, and three stages where any can: two full layers share a layer of the pool, but for
    the small one, whose sliding layers do."""
    kinds = ["full_attention", "full_attention", "sliding_attention"]
    own = fields(random.Random(family), 0) | {
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "num_global_key_value_heads": 4,
        "num_hidden_layers": 6,
        "layer_types": [*kinds, "sliding_attention", *kinds[:2]],
    }
    if family == "gemma4_moe":
        experts = {"num_experts": 8, "top_k_experts": 3, "moe_intermediate_size": 16}
        own |= {"enable_moe_block": True, **experts}
    if family == "gemma4_small":
        own |= {
            "num_key_value_heads": 4,
            "attention_k_eq_v": False,
            "layer_types": [kinds[2], kinds[2], kinds[0]] * 2,
            "hidden_size_per_layer_input": 8,
            "vocab_size_per_layer_input": own["vocab_size"],
            "num_kv_shared_layers": 3,
            "use_double_wide_mlp": True,
        }
    return transformers.Gemma4TextConfig(**own)
