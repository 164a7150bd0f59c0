"""Tiny configurations of models with recurrent layers, and of those of their kin that have none."""

import random
from typing import Any

import transformers

from tests.models.config_parts import ROPES, common, deepseek, qwen_experts, rope


def qwen3_next(rng: random.Random, i: int) -> Any:
    return transformers.Qwen3NextConfig(
        **_qwen(rng, i, qwen_experts(rng, i)), shared_expert_intermediate_size=20
    )


def qwen3_5(rng: random.Random, i: int) -> Any:
    fields = _qwen(rng, i, common(rng))
    if i == 0:
        fields["head_dim"] = 48  # a state takes no more blocks than those of the others
    return transformers.Qwen3_5TextConfig(**fields)


def qwen3_5_moe(rng: random.Random, i: int) -> Any:
    fields = _qwen(rng, i, qwen_experts(rng, i))
    known = {
        name: fields[name]
        for name in fields
        if name not in ("norm_topk_prob", "mlp_only_layers", "decoder_sparse_step")
    }
    return transformers.Qwen3_5MoeTextConfig(**known, shared_expert_intermediate_size=20)


def _qwen(rng: random.Random, i: int, fields: dict[str, Any]) -> dict[str, Any]:
    num_layers = (4, 3, 5, 6, 4, 6)[i]
    # The norm behind a state makes vectors of length one of what may be all but nothing, such as the first token's key times its
    # query. With a small epsilon the rounding of that is then what two implementations differ in.
    fields["rms_norm_eps"], fields["hidden_size"] = 1e-3, max(32, fields["hidden_size"])
    attends = {3: {1, 4}, 5: {0, 5}}.get(i, {num_layers - 1 - i % 2})
    return {
        **fields,
        "num_hidden_layers": num_layers,
        "rope_parameters": {**rope(rng, ROPES[i]), "partial_rotary_factor": (0.25, 0.5, 1.0)[i % 3]},
        "attention_bias": i % 2 == 1,
        "layer_types": ["full_attention" if j in attends else "linear_attention" for j in range(num_layers)],
        "linear_conv_kernel_dim": (4, 2, 3)[i % 3],
        "linear_key_head_dim": rng.choice((16, 24)),
        "linear_value_head_dim": rng.choice((32, 40)),
        "linear_num_key_heads": (heads := rng.choice((1, 2))),
        "linear_num_value_heads": heads * rng.choice((1, 2, 3)),
    }


def granite_hybrid(rng: random.Random, i: int) -> Any:
    fields = common(rng)
    fields.pop("head_dim")
    fields["num_hidden_layers"] = num_layers = (3, 4, 5, 6, 4, 2)[i]
    fields["hidden_size"] = fields["num_attention_heads"] * rng.choice((8, 16))
    heads = fields["hidden_size"] * 2 // 8 // (1 + i % 2)
    attends = {1: {0, 3}, 3: {1, 4}}.get(i, {num_layers - 2})
    return transformers.GraniteMoeHybridConfig(
        **fields,
        rope_parameters=rope(rng, ROPES[i]),
        position_embedding_type=("nope", "rope", None)[i % 3],
        attention_bias=i % 2 == 1,
        embedding_multiplier=rng.choice((1.0, 3.0)),
        residual_multiplier=rng.choice((1.0, 0.6)),
        attention_multiplier=rng.choice((0.1, 0.3)),
        logits_scaling=rng.choice((1.0, 2.0)),
        num_local_experts=(8, 0, 5)[i % 3],
        num_experts_per_tok=rng.choice((1, 3)),
        shared_intermediate_size=rng.choice((20, 36)),
        layer_types=["attention" if j in attends else "mamba" for j in range(num_layers)],
        mamba_n_heads=heads,
        mamba_n_groups=rng.choice([n for n in (1, 2) if heads % n == 0]),
        mamba_d_state=rng.choice((16, 24)),
        mamba_d_conv=(4, 2, 3)[i % 3],
        mamba_conv_bias=i != 2,
        mamba_proj_bias=i % 4 == 3,
    )


def granite4(rng: random.Random, i: int) -> Any:
    """Granite 4 without recurrent layers."""
    config = granite_hybrid(rng, i)
    config.layer_types = ["full_attention"] * config.num_hidden_layers
    return config


def nemotron_h(rng: random.Random, i: int) -> Any:
    fields = common(rng)
    letters = {"M": "linear_attention", "*": "full_attention", "-": "mlp", "E": "moe"}
    heads = fields["num_key_value_heads"] * (groups := rng.choice((1, 2)))
    return transformers.NemotronHConfig(
        **{
            name: value for name, value in fields.items() if name not in ("rms_norm_eps", "num_hidden_layers")
        },
        layer_norm_epsilon=fields["rms_norm_eps"],
        layers_block_type=[letters[each] for each in ("M*M-", "ME*E", "-M*ME", "M*-M*E", "EM-*", "MM-E*")[i]],
        mlp_bias=i % 2 == 1,
        use_bias=i % 4 == 3,
        use_conv_bias=i != 2,
        conv_kernel=(4, 2, 3)[i % 3],
        n_groups=fields["num_key_value_heads"] * groups,
        mamba_num_heads=heads * rng.choice((1, 2)),
        mamba_head_dim=rng.choice((8, 16)),
        ssm_state_size=rng.choice((16, 24)),
        time_step_min=1e-6,  # below which only transformers' chunks let no step be
        n_routed_experts=8,
        num_experts_per_tok=3,
        moe_intermediate_size=rng.choice((16, 24)),
        moe_shared_expert_intermediate_size=20,
        moe_latent_size=(None, 12)[i % 2],
        n_group=(1, 4)[i % 2],
        topk_group=(1, 2)[i % 2],
        norm_topk_prob=i != 2,
        routed_scaling_factor=1.5,
    )


def kimi_linear(rng: random.Random, i: int) -> Any:
    fields = deepseek(rng, i)
    fields["rms_norm_eps"] = 1e-3  # as in `_qwen`
    num_layers = fields["num_hidden_layers"] = (3, 4, 5, 3, 4, 6)[i]
    dense, num_experts = fields.pop("first_k_dense_replace"), fields.pop("n_routed_experts")
    attends = {2: {1, 4}, 5: {0, 3}}.get(i, {num_layers - 1 - i % 2})
    del fields["rope_parameters"]
    return transformers.KimiLinearConfig(
        **fields,
        num_local_experts=num_experts,
        n_group=(1, 4)[i % 2],
        topk_group=(1, 2)[i % 2],
        norm_topk_prob=i != 2,
        mlp_layer_types=["dense"] * dense + ["sparse"] * (num_layers - dense),
        layer_types=["full_attention" if j in attends else "linear_attention" for j in range(num_layers)],
        linear_num_heads=rng.choice((1, 2, 3)),
        linear_head_dim=rng.choice((8, 16)),
        linear_conv_kernel_dim=(4, 2, 3)[i % 3],
    )


def lfm2(rng: random.Random, i: int) -> Any:
    """Every second one has experts."""
    if i % 2:
        return transformers.Lfm2MoeConfig(
            **_convolving(rng, i),
            moe_intermediate_size=24,
            num_experts=8,
            num_experts_per_tok=3,
            num_dense_layers=i % 3,
            norm_topk_prob=i != 1,
            use_expert_bias=i != 3,
            routed_scaling_factor=1.5,
        )
    return transformers.Lfm2Config(
        **_convolving(rng, i),
        block_auto_adjust_ff_dim=i != 2,
        block_multiple_of=8,
        block_ffn_dim_multiplier=(1.0, 1.2)[i // 4],
    )


def _convolving(rng: random.Random, i: int) -> dict[str, Any]:
    fields = common(rng)
    fields.pop("head_dim")
    fields["hidden_size"] = fields["num_attention_heads"] * rng.choice((8, 16))
    fields["num_hidden_layers"] = num_layers = (3, 4, 5, 6, 4, 2)[i]
    attends = {1: {0, 3}, 3: {1, 4}}.get(i, {num_layers - 1 - i % 2})
    return {
        **{name: value for name, value in fields.items() if name != "rms_norm_eps"},
        "norm_eps": fields["rms_norm_eps"],
        "rope_parameters": rope(rng, ROPES[i]),
        "layer_types": ["full_attention" if j in attends else "conv" for j in range(num_layers)],
        "conv_L_cache": (3, 2, 4)[i % 3],
        "conv_bias": i > 2,
    }
