"""Tiny configurations of families of 2025 and later."""

import random
from typing import Any

import transformers

from tests.models.config_parts import ROPES, common, rope

# transformers reads it as the decoder of a model that sees, and as no model of its own.
transformers.AutoModelForCausalLM.register(
    transformers.Mistral4Config, transformers.Mistral4ForCausalLM, exist_ok=True
)


def minimax_m2(rng: random.Random, i: int) -> Any:
    """Published ones rotate half of each head."""
    fields = {**common(rng), "head_dim": 16}
    return transformers.MiniMaxM2Config(
        **fields,
        rope_parameters={**rope(rng, ROPES[i]), "partial_rotary_factor": (0.5, 1.0, 0.25)[i % 3]},
        num_local_experts=(8, 5)[i % 2],
        num_experts_per_tok=rng.choice((1, 3)),
    )


def ministral3(rng: random.Random, i: int) -> Any:
    return transformers.Ministral3Config(
        **common(rng), rope_parameters=growing(rng, i), sliding_window=(None, None, 16, None, 64, None)[i]
    )


def growing(rng: random.Random, i: int) -> dict[str, Any]:
    """A rotation with what makes queries grow, from their second few tokens on. Published ones scale as YaRN does."""
    kind = ("yarn", "llama3", "yarn", "linear", "linear", "yarn")[i]
    scaled = {"mscale": 1.0, "mscale_all_dim": 1.0} if i % 2 == 0 else {}
    first = rng.choice((5, 16))
    return {
        **rope(rng, kind),
        **scaled,
        "original_max_position_embeddings": first,
        "llama_4_scaling_beta": rng.choice((0.1, 0.6)),
    }
