"""Tiny configurations of Gemma 3, Granite 3, OLMo, Phi-3, GLM-4 and Llama 4."""

import random
from typing import Any

import transformers

from tests.models.config_parts import CONTEXT, ROPES, common, rope


def gemma3(rng: random.Random, i: int) -> Any:
    fields = common(rng)
    fields["tie_word_embeddings"] = i != 4
    fields["num_hidden_layers"] = (3, 2, 3, 7, 2, 3)[
        i
    ]  # without layer_types, the sixth attends to everything
    kinds = ["sliding_attention", "full_attention", "sliding_attention"]
    return transformers.Gemma3TextConfig(
        **fields,
        query_pre_attn_scalar=rng.choice((8, 24)),
        sliding_window=rng.choice((6, 16)),
        layer_types=None if i == 3 else kinds[: fields["num_hidden_layers"]],
        rope_parameters={
            "full_attention": rope(rng, ROPES[i]),
            "sliding_attention": {"rope_type": "default", "rope_theta": rng.choice((1000.0, 20000.0))},
        },
        final_logit_softcapping=(7.0, None)[i % 2],
        attention_bias=i == 2,
    )


def granite(rng: random.Random, i: int) -> Any:
    fields = common(rng)
    fields.pop("head_dim")
    fields["hidden_size"] = fields["num_attention_heads"] * rng.choice((8, 16))
    return transformers.GraniteConfig(
        **fields,
        rope_parameters=rope(rng, ROPES[i]),
        attention_bias=rng.random() < 0.5,
        mlp_bias=rng.random() < 0.5,
        embedding_multiplier=rng.choice((1.0, 3.0)),
        residual_multiplier=rng.choice((1.0, 0.6)),
        attention_multiplier=rng.choice((0.1, 0.2)),
        logits_scaling=rng.choice((2.0, 8.0)),
    )


def olmo(rng: random.Random) -> dict[str, Any]:
    fields = common(rng)
    fields.pop("head_dim")
    fields["hidden_size"] = fields["num_attention_heads"] * rng.choice((8, 16))
    return {**fields, "attention_bias": rng.random() < 0.5}


def olmo2(rng: random.Random, i: int) -> Any:
    return transformers.Olmo2Config(**olmo(rng), rope_parameters=rope(rng, ROPES[i]))


def olmo3(rng: random.Random, i: int) -> Any:
    fields = olmo(rng)
    fields["num_hidden_layers"] = (3, 2, 3, 5, 2, 3)[
        i
    ]  # without layer_types, the fourth attends to everything
    kinds = ["sliding_attention", "full_attention", "sliding_attention"]
    full = rope(rng, ROPES[i])
    within = {"rope_type": "default", "rope_theta": full["rope_theta"]}
    return transformers.Olmo3Config(
        **fields,
        sliding_window=rng.choice((6, 16)),
        layer_types=None if i == 3 else kinds[: fields["num_hidden_layers"]],
        rope_parameters={"full_attention": full, "sliding_attention": within},
    )


def phi3(rng: random.Random, i: int) -> Any:
    """The first is short, and the next two are long from the second token on: in transformers, too."""
    fields = olmo(rng)
    fields.pop("attention_bias")
    head_dim = 16
    fields["hidden_size"] = fields["num_attention_heads"] * head_dim
    fraction = (1.0, 0.75, 1.0, 0.5, 1.0, 0.25)[i]
    rotation: dict[str, Any] = {"rope_type": "default"}
    if i < 3:
        lists = [[rng.uniform(1, 9) for _ in range(int(head_dim * fraction) // 2)] for _ in range(2)]
        rotation = {"rope_type": "longrope", "short_factor": lists[0], "long_factor": lists[1]}
        rotation |= {"factor": 4.0} if i == 0 else {"attention_factor": 1.3}
    return transformers.Phi3Config(
        **fields,
        original_max_position_embeddings=(CONTEXT, 1, 1)[i] if i < 3 else 64,
        rope_parameters={**rotation, "rope_theta": 10000.0, "partial_rotary_factor": fraction},
        sliding_window=(None, 7, None, 16, None, 64)[i],
    )


def glm(rng: random.Random, i: int) -> dict[str, Any]:
    rotation = {"partial_rotary_factor": (0.5, 0.25, 1.0)[i % 3]}
    return {
        **common(rng),
        "head_dim": 16,
        "tie_word_embeddings": i == 1,
        "rope_parameters": {"rope_type": "default", "rope_theta": rng.choice((1e4, 5e5)), **rotation},
        "attention_bias": i != 4,
    }


def glm4_first(rng: random.Random, i: int) -> Any:
    return transformers.GlmConfig(**glm(rng, i))


def glm4(rng: random.Random, i: int) -> Any:
    return transformers.Glm4Config(**glm(rng, i))


def glm4_moe(rng: random.Random, i: int) -> Any:
    return transformers.Glm4MoeConfig(
        **glm(rng, i),
        num_experts_per_tok=3,
        n_routed_experts=8,
        n_shared_experts=1 + i % 2,
        moe_intermediate_size=16,
        first_k_dense_replace=i % 3,
        routed_scaling_factor=1.5,
        n_group=(1, 4)[i % 2],
        topk_group=(1, 2)[i % 2],
        norm_topk_prob=i != 2,
        use_qk_norm=i % 2 == 0,
    )


def llama4(rng: random.Random, i: int) -> Any:
    """Published checkpoints are like the first, or, with every other layer sparse and without norms, like the second."""
    fields = common(rng)
    fields["num_hidden_layers"] = (4, 3, 3, 2, 5, 3)[i]
    return transformers.Llama4TextConfig(
        **fields,
        intermediate_size_mlp=48,
        rope_parameters=rope(rng, ("llama3", "default", "llama3", "default", "linear", "yarn")[i]),
        num_local_experts=(8, 4)[i % 2],
        num_experts_per_tok=1,
        interleave_moe_layer_step=(1, 2)[i % 2],
        moe_layers=[1] if i == 2 else None,
        use_qk_norm=i % 2 == 0,
        no_rope_layers=[1, 0, 1] if i == 5 else None,
        no_rope_layer_interval=(4, 2)[i % 2],
        layer_types=["full_attention", "chunked_attention", "chunked_attention"] if i == 5 else None,
        attention_chunk_size=(16, 8, 24, None, 4, 12)[i],
        attn_temperature_tuning=i != 4,
        floor_scale=rng.choice((5, 16)),
        attn_scale=rng.choice((0.1, 0.6)),
        attention_bias=i == 1,
    )


def granite_moe(rng: random.Random, i: int) -> Any:
    dense = granite(rng, i)
    kept = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
        "num_key_value_heads", "max_position_embeddings", "tie_word_embeddings", "rms_norm_eps", "rope_parameters",
        "attention_bias", "embedding_multiplier", "residual_multiplier", "attention_multiplier", "logits_scaling",
        "bos_token_id", "eos_token_id", "pad_token_id")  # fmt: skip
    return transformers.GraniteMoeConfig(
        **{name: getattr(dense, name) for name in kept},
        num_local_experts=(8, 5)[i % 2],
        num_experts_per_tok=rng.choice((1, 3)),
    )
