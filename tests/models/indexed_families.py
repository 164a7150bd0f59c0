"""Tiny configurations of DeepSeek-V3.2 and GLM-5, whose queries choose the tokens that they attend to."""

import random
from typing import Any

import transformers

from tests.models.config_parts import deepseek


def indexed(rng: random.Random, i: int) -> dict[str, Any]:
    """There are so many index heads that hardly any score is zero: which of equal scores transformers takes is anyone's."""
    fields = {**deepseek(rng, i), "q_lora_rank": 12}
    dense = fields.pop("first_k_dense_replace")
    sparse = fields["num_hidden_layers"] - dense
    return {
        **fields,
        "mlp_layer_types": None if i == 1 else ["dense"] * dense + ["sparse"] * sparse,
        "n_group": (1, 4)[i % 2],
        "topk_group": (1, 2)[i % 2],
        "norm_topk_prob": i != 2,
        "index_n_heads": (12, 16)[i % 2],
        "index_head_dim": (16, 8, 12)[i % 3],
        "index_topk": (8, 16, 11, 1, 33, 8)[i],
    }


def deepseek_v32(rng: random.Random, i: int) -> Any:
    return transformers.DeepseekV32Config(**indexed(rng, i))


def glm_moe_dsa(rng: random.Random, i: int) -> Any:
    """Published ones share no choice, as the second, or all but every fourth, as the others do with fewer layers."""
    fields = indexed(rng, i)
    kinds = ["full", "shared", "shared"] if i % 2 else ["full", "shared", "full"]
    return transformers.GlmMoeDsaConfig(
        **fields, indexer_types=None if i == 1 else kinds[: fields["num_hidden_layers"]]
    )
