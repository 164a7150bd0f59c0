"""Tiny configurations of families of 2025 and later."""

import random
from typing import Any

import transformers

from tests.models.config_parts import ROPES, common, rope


def minimax_m2(rng: random.Random, i: int) -> Any:
    """Published ones rotate half of each head."""
    fields = {**common(rng), "head_dim": 16}
    return transformers.MiniMaxM2Config(
        **fields,
        rope_parameters={**rope(rng, ROPES[i]), "partial_rotary_factor": (0.5, 1.0, 0.25)[i % 3]},
        num_local_experts=(8, 5)[i % 2],
        num_experts_per_tok=rng.choice((1, 3)),
    )
