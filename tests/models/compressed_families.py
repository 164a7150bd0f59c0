"""Tiny configurations of DeepSeek-V4, whose older tokens are summed up in entries."""

import random
from typing import Any

import transformers

from tests.models.config_parts import VOCAB

_KINDS = ("sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention")
_LAYERS = (
    (2, 1, 0),
    (1, 1),
    (2, 2),
    (0, 1, 2),
    (2, 1, 2),
    (1, 2, 1),
)


def deepseek_v4(rng: random.Random, i: int) -> Any:
    """As published: the fifth, with YaRN. There are so many index heads that hardly any score is zero."""
    kinds = [_KINDS[kind] for kind in _LAYERS[i]]
    heads, groups = ((4, 2), (6, 3), (4, 4), (8, 2), (4, 2), (2, 1))[i]
    rope = {
        "rope_type": "yarn",
        "factor": 4.0,
        "beta_fast": 32,
        "beta_slow": 1,
        "original_max_position_embeddings": 32,
    }
    return transformers.DeepseekV4Config(
        vocab_size=VOCAB,
        hidden_size=rng.choice((16, 24)),
        moe_intermediate_size=rng.choice((12, 20)),
        num_hidden_layers=len(kinds),
        layer_types=kinds,
        mlp_layer_types=["hash_moe" if layer == i % 2 else "moe" for layer in range(len(kinds))],
        num_attention_heads=heads,
        head_dim=(16, 24, 16, 16, 32, 16)[i],
        partial_rotary_factor=(0.5, 1 / 3, 0.25, 0.5, 0.25, 0.5)[i],
        q_lora_rank=12,
        o_groups=groups,
        o_lora_rank=rng.choice((6, 10)),
        compress_rates={_KINDS[1]: (4, 2, 4, 3, 4, 5)[i], _KINDS[2]: (8, 16, 11, 6, 16, 8)[i]},
        sliding_window=(9, 5, 16, 7, 12, 6)[i],
        index_n_heads=12,
        index_head_dim=16,
        index_topk=(3, 5, 4, 2, 6, 100)[i],
        n_routed_experts=(4, 8, 6, 4, 8, 6)[i],
        num_experts_per_tok=(2, 3, 1, 2, 2, 3)[i],
        routed_scaling_factor=(1.5, 1.0)[i % 2],
        scoring_func="sqrtsoftplus",
        swiglu_limit=(10.0, 0.5)[i % 2],
        hc_mult=(4, 2)[i % 2],
        hc_sinkhorn_iters=(20, 3)[i % 2],
        max_position_embeddings=128,
        rope_parameters=rope if i % 2 == 0 else None,
        tie_word_embeddings=False,
        initializer_range=0.02,
    )
