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


def ministral3(rng: random.Random, i: int) -> Any:
    return transformers.Ministral3Config(
        **common(rng), rope_parameters=growing(rng, i), sliding_window=(None, None, 16, None, 64, None)[i]
    )


def growing(rng: random.Random, i: int) -> dict[str, Any]:
    """A rotation with what makes queries grow, from their second few tokens on. Published ones scale as YaRN does."""
    kind = ("yarn", "llama3", "yarn", "linear", "linear", "yarn")[i]
    scaled = {"mscale": 1.0, "mscale_all_dim": 1.0} if i in (0, 2) else {}
    first = rng.choice((5, 16))
    return {
        **rope(rng, kind),
        **scaled,
        "original_max_position_embeddings": first,
        "llama_4_scaling_beta": rng.choice((0.1, 0.3)),
    }


def seed_oss(rng: random.Random, i: int) -> Any:
    return transformers.SeedOssConfig(
        **common(rng),
        rope_parameters=rope(rng, ROPES[i]),
        attention_bias=i != 2,
        attention_out_bias=i == 1,
        mlp_bias=i == 3,
    )


def smollm3(rng: random.Random, i: int) -> Any:
    """Published ones rotate nothing in every fourth layer, and have no windows."""
    fields = common(rng)
    fields["num_hidden_layers"] = (4, 3, 3, 2, 5, 3)[i]
    fields.pop("head_dim")
    fields["hidden_size"] = 16 * fields["num_attention_heads"]
    return transformers.SmolLM3Config(
        **fields,
        rope_parameters=rope(rng, ROPES[i]),
        no_rope_layers=[1, 0, 1] if i == 5 else None,
        no_rope_layer_interval=(4, 2)[i % 2],
        use_sliding_window=i == 3,
        sliding_window=7,
        attention_bias=i == 1,
        mlp_bias=i == 2,
    )


def exaone4(rng: random.Random, i: int) -> Any:
    """Published ones are like the first, or, without windows, like the second."""
    fields = common(rng)
    fields["num_hidden_layers"] = num_layers = (5, 2, 3, 2, 4, 3)[i]
    return transformers.Exaone4Config(
        **fields,
        rope_parameters=rope(rng, ROPES[i]),
        sliding_window=None if i == 1 else rng.choice((6, 16)),
        sliding_window_pattern=(4, 4, 2)[i % 3],
        layer_types=["full_attention"] * num_layers if i == 1 else None,
    )


def ernie4_5(rng: random.Random, i: int) -> Any:
    return transformers.Ernie4_5Config(**common(rng), rope_parameters=rope(rng, ROPES[i]), use_bias=i == 1)


def dots1(rng: random.Random, i: int) -> Any:
    return transformers.Dots1Config(
        **common(rng),
        rope_parameters=rope(rng, ROPES[i]),
        attention_bias=i == 1,
        sliding_window=(None, 7)[i % 2],
        max_window_layers=1,
        n_routed_experts=8,
        n_shared_experts=1 + i % 2,
        num_experts_per_tok=3,
        moe_intermediate_size=16,
        first_k_dense_replace=i % 3,
        routed_scaling_factor=1.5,
        n_group=(1, 4)[i % 2],
        topk_group=(1, 2)[i % 2],
        norm_topk_prob=i != 2,
    )


def ernie4_5_moe(rng: random.Random, i: int) -> Any:
    return transformers.Ernie4_5_MoeConfig(
        **common(rng),
        rope_parameters=rope(rng, ROPES[i]),
        moe_intermediate_size=16,
        moe_k=rng.choice((1, 3)),
        moe_num_experts=8,
        moe_num_shared_experts=(2, 0, 1)[i % 3],
        moe_layer_start_index=(1, 0)[i % 2],
        moe_layer_end_index=1 if i == 3 else -1,
        moe_layer_interval=2 if i == 5 else 1,
    )


def hunyuan(rng: random.Random, i: int) -> dict[str, Any]:
    """Published ones are like the first."""
    rotation = rope(rng, ("dynamic", "default", "llama3", "linear", "dynamic", "default")[i])
    if i == 0:
        rotation["alpha"] = 1000.0
    return {**common(rng), "rope_parameters": rotation, "attention_bias": i == 1}


def hunyuan_dense(rng: random.Random, i: int) -> Any:
    return transformers.HunYuanDenseV1Config(**hunyuan(rng, i))


def hunyuan_moe(rng: random.Random, i: int) -> Any:
    fields, top_k = hunyuan(rng, i), rng.choice((1, 3))
    fields["hidden_size"] = max(72, fields["hidden_size"])
    each = [top_k] * fields["num_hidden_layers"] if i % 2 else top_k
    return transformers.HunYuanMoEV1Config(**fields, num_experts=8, moe_topk=each)


def cohere_fields(rng: random.Random, i: int) -> dict[str, Any]:
    fields = common(rng)
    fields.pop("head_dim")
    eps = fields.pop("rms_norm_eps")
    return {
        **fields,
        "hidden_size": fields["num_attention_heads"] * rng.choice((8, 16)),
        "layer_norm_eps": eps,
        "rope_parameters": rope(rng, ROPES[i]),
        "logit_scale": rng.choice((0.0625, 0.8)),
        "attention_bias": i == 1,
    }


def cohere(rng: random.Random, i: int) -> Any:
    return transformers.CohereConfig(**cohere_fields(rng, i))


def cohere2(rng: random.Random, i: int) -> Any:
    fields = cohere_fields(rng, i)
    fields["num_hidden_layers"] = (5, 2, 3, 4, 3, 2)[
        i
    ]  # without layer_types, the fourth attends to everything
    kinds = ["sliding_attention", "full_attention", "sliding_attention"]
    return transformers.Cohere2Config(
        **fields,
        sliding_window=rng.choice((6, 16)),
        layer_types=kinds[: fields["num_hidden_layers"]] if i in (1, 2) else None,
    )
