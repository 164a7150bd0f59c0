"""What is read from a config.json is what transformers' own model of that configuration has."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoModelForCausalLM,
    DeepseekV3Config,
    DeepseekV4Config,
    DeepseekV32Config,
    Dots1Config,
    Ernie4_5_MoeConfig,
    Gemma4TextConfig,
    Glm4MoeLiteConfig,
    GlmMoeDsaConfig,
    GraniteMoeHybridConfig,
    HunYuanMoEV1Config,
    KimiLinearConfig,
    LlamaConfig,
    MiniMaxM2Config,
    MixtralConfig,
    NemotronHConfig,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3MoeConfig,
    Qwen3NextConfig,
)

from core.errors import ConfigError
from models.families.table import read_spec
from sim.catalogue.catalogue import GPUS, MODELS, num_blocks, step_cost
from sim.catalogue.model_config import model_of, named_model, read_model

SIZES: dict[str, Any] = {
    "vocab_size": 1000,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
}
_EXPERTS: dict[str, Any] = {
    "moe_intermediate_size": 128,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
}
_LATENT: dict[str, Any] = {
    **SIZES,
    **_EXPERTS,
    "kv_lora_rank": 64,
    "q_lora_rank": 96,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 32,
    "v_head_dim": 32,
}
_INDEX: dict[str, Any] = {"index_n_heads": 6, "index_head_dim": 32, "index_topk": 100}
SIZES_V4: dict[str, Any] = {
    "vocab_size": 1000,
    "hidden_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "head_dim": 64,
    "moe_intermediate_size": 128,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "q_lora_rank": 96,
    "o_lora_rank": 64,
    "o_groups": 4,
    "index_n_heads": 6,
    "index_head_dim": 32,
}
GEMMA4: dict[str, Any] = {**SIZES, "head_dim": 32, "global_head_dim": 64, "num_global_key_value_heads": 1}
CONFIGS = {
    "llama": LlamaConfig(**SIZES),
    "tied, with its own head size": Qwen3Config(**SIZES, head_dim=64, tie_word_embeddings=True),
    "mixtral": MixtralConfig(**SIZES, num_local_experts=8, num_experts_per_tok=2),
    "qwen3 moe": Qwen3MoeConfig(
        **SIZES,
        head_dim=32,
        moe_intermediate_size=128,
        num_experts=16,
        num_experts_per_tok=4,
        mlp_only_layers=[1],
    ),
    "deepseek v3": DeepseekV3Config(**_LATENT, first_k_dense_replace=1, n_group=1, topk_group=1),
    "glm 4.7 flash": Glm4MoeLiteConfig(**_LATENT, mlp_layer_types=["dense", "sparse", "dense", "sparse"]),
    "deepseek v3.2": DeepseekV32Config(**_LATENT, **_INDEX, mlp_layer_types=["dense", "sparse"] * 2),
    "glm 5": GlmMoeDsaConfig(
        **_LATENT,
        **_INDEX,
        mlp_layer_types=["dense", "sparse"] * 2,
        indexer_types=["full", "shared", "full", "shared"],
    ),
    "deepseek v4": DeepseekV4Config(
        **SIZES_V4,
        layer_types=["sliding_attention", "compressed_sparse_attention"]
        + ["heavily_compressed_attention"] * 2,
    ),
    "minimax m2": MiniMaxM2Config(**SIZES, head_dim=64, num_local_experts=16, num_experts_per_tok=4),
    "dots.llm1": Dots1Config(**SIZES, **_EXPERTS, first_k_dense_replace=1),
    "ernie 4.5": Ernie4_5_MoeConfig(
        **SIZES,
        moe_intermediate_size=128,
        moe_k=4,
        moe_num_experts=16,
        moe_layer_start_index=1,
        moe_layer_end_index=2,
        tie_word_embeddings=False,
    ),
    "hunyuan": HunYuanMoEV1Config(**SIZES, head_dim=32, num_experts=8, moe_topk=[2] * 4),
    "gemma 4": Gemma4TextConfig(**GEMMA4, hidden_size_per_layer_input=0, attention_k_eq_v=True),
    "gemma 4 small": Gemma4TextConfig(
        **GEMMA4,
        vocab_size_per_layer_input=1000,
        hidden_size_per_layer_input=32,
        num_kv_shared_layers=2,
        use_double_wide_mlp=True,
        layer_types=["sliding_attention", "full_attention"] * 2,
    ),
    "gemma 4 moe": Gemma4TextConfig(
        **GEMMA4,
        hidden_size_per_layer_input=0,
        enable_moe_block=True,
        num_experts=8,
        top_k_experts=2,
        moe_intermediate_size=128,
    ),
}

_DELTA: dict[str, Any] = {
    **SIZES,
    "head_dim": 64,
    "layer_types": ["linear_attention", "linear_attention", "linear_attention", "full_attention"],
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 64,
}
_DELTA_EXPERTS: dict[str, Any] = {
    "moe_intermediate_size": 128,
    "shared_expert_intermediate_size": 128,
    "num_experts": 16,
    "num_experts_per_tok": 4,
}
_NEMOTRON: dict[str, Any] = {
    **{name: size for name, size in SIZES.items() if name != "num_hidden_layers"},
    "layers_block_type": ["linear_attention", "moe", "linear_attention", "full_attention", "mlp"],
    "head_dim": 64,
    "mamba_num_heads": 8,
    "ssm_state_size": 32,
    "n_groups": 2,
    "n_routed_experts": 8,
    "moe_intermediate_size": 128,
    "moe_shared_expert_intermediate_size": 384,
}
_KIMI: dict[str, Any] = {
    **_LATENT,
    "num_key_value_heads": 8,
    "q_lora_rank": None,
    "pad_token_id": None,
    "num_local_experts": 8,
    "layer_types": ["linear_attention", "linear_attention", "linear_attention", "full_attention"],
    "linear_num_heads": 4,
    "linear_head_dim": 32,
}
HYBRIDS = {
    "qwen3 next": Qwen3NextConfig(**_DELTA, **_DELTA_EXPERTS),
    "qwen3.5": Qwen3_5TextConfig(**_DELTA),
    "qwen3.5 moe": Qwen3_5MoeTextConfig(**_DELTA, **_DELTA_EXPERTS),
    "granite 4 h": GraniteMoeHybridConfig(
        **SIZES,
        layer_types=["mamba", "mamba", "attention", "mamba"],
        mamba_n_heads=16,
        mamba_d_state=32,
        shared_intermediate_size=384,
        num_local_experts=8,
        num_experts_per_tok=2,
        tie_word_embeddings=True,
    ),
    "nemotron h": NemotronHConfig(**_NEMOTRON),
    "nemotron 3": NemotronHConfig(**_NEMOTRON, moe_latent_size=64),
    "kimi linear": KimiLinearConfig(**_KIMI),
    "granite 4 h, dense": GraniteMoeHybridConfig(
        **SIZES,
        layer_types=["mamba", "mamba", "attention", "mamba"],
        mamba_n_heads=16,
        mamba_d_state=32,
        shared_intermediate_size=384,
        num_local_experts=0,
    ),
}


@pytest.mark.parametrize("name", [*CONFIGS, *HYBRIDS])
def test_the_weights_are_those_of_transformers(name: str) -> None:
    config = (CONFIGS | HYBRIDS)[name]
    with torch.device("meta"):
        reference = AutoModelForCausalLM.from_config(config)
    model = model_of(config.to_dict())
    counted = model.num_weights + model.num_expert_weights
    assert counted == pytest.approx(sum(p.numel() for p in reference.parameters()), rel=0.01)
    experts = sum(p.numel() for n, p in reference.named_parameters() if ".experts." in n)
    assert model.num_expert_weights == experts
    assert model.total_bytes == pytest.approx(2 * counted)


def test_a_token_uses_as_many_experts_as_it_is_said_to_however_that_is_said() -> None:
    names = ("mixtral", "qwen3 moe", "deepseek v3", "glm 4.7 flash", "minimax m2", "ernie 4.5", "hunyuan")
    assert {name: model_of(CONFIGS[name].to_dict()).expert_share for name in names} == dict.fromkeys(
        names, 0.25
    )


def test_a_latent_is_kept_in_place_of_keys_and_values() -> None:
    model = model_of(CONFIGS["deepseek v3"].to_dict())
    assert model.kv_token_bytes == 4 * (64 + 16) * 2
    assert model_of(CONFIGS["llama"].to_dict()).kv_token_bytes == 4 * 2 * 2 * 32 * 2


@pytest.mark.parametrize(("name", "choosing"), [("deepseek v3.2", 4), ("glm 5", 2)])
def test_chosen_tokens_are_kept_with_index_keys_and_all_are_scored(name: str, choosing: int) -> None:
    """Beyond as many tokens as are chosen, each more costs a step the reading of its index keys alone."""
    model, dense = (model_of(CONFIGS[which].to_dict()) for which in (name, "deepseek v3"))
    assert model.kv_token_bytes == 4 * (64 + 16 + 32) * 2
    cost, all_read = (step_cost(GPUS["H100"], each) for each in (model, dense))
    short, long, longer = (cost.memory_s(1, tokens, 1) for tokens in (100, 1000, 2000))
    assert longer - long == pytest.approx(1000 * choosing * 32 * 2 / (3350e9 * 0.8))
    few = 100 * (choosing * 32 + 4 * (64 + 16)) * 2 / (3350e9 * 0.8)
    assert short - cost.memory_s(1, 0, 1) == pytest.approx(few)
    assert cost.memory_s(8, 8 * 1000, 8) - cost.memory_s(8, 8 * 900, 8) == pytest.approx(
        8 * (longer - long) / 10
    )
    attends = all_read.compute_s(10, 10 * 100) - all_read.compute_s(10, 0)
    scores = 2 * choosing * 6 * 32 / (989e12 * 0.6)
    assert cost.compute_s(10, 10 * 100) - cost.compute_s(10, 0) == pytest.approx(attends + 1000 * scores)
    assert cost.compute_s(10, 10 * 500) - cost.compute_s(10, 10 * 100) == pytest.approx(4000 * scores)


def test_layers_with_other_heads_keep_what_the_engine_keeps() -> None:
    """A layer of the pool has room for 2 heads of 32, or for 2 of 64 where the largest layer has these."""
    kept = {name: model_of(CONFIGS[name].to_dict()).kv_token_bytes for name in ("gemma 4", "gemma 4 small")}
    assert kept == {"gemma 4": 4 * 2 * 2 * 32 * 2, "gemma 4 small": 2 * 2 * 2 * 64 * 2}


def test_the_catalogue_has_what_its_models_configurations_say() -> None:
    known = MODELS["llama-3.1-8b"]
    read = model_of(
        LlamaConfig(
            vocab_size=128_256,
            hidden_size=4096,
            intermediate_size=14_336,
            num_hidden_layers=32,
            num_attention_heads=32,
            num_key_value_heads=8,
        ).to_dict()
    )
    assert read.num_weights == pytest.approx(known.num_weights, rel=0.001)
    assert (read.kv_token_bytes, read.pair_flop) == (known.kv_token_bytes, known.pair_flop)


@pytest.mark.parametrize(
    ("quantised", "least", "most"),
    [
        ({"quant_method": "fp8"}, 1.0, 1.01),
        ({"quant_method": "awq", "bits": 4, "group_size": 128}, 0.5, 0.55),
        (
            {
                "quant_method": "compressed-tensors",
                "config_groups": {"group_0": {"weights": {"num_bits": 8}}},
            },
            1.0,
            1.05,
        ),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, 0.56, 0.57),
        ({"quant_method": "modelopt", "quant_algo": "FP8_PB_WO"}, 1.0, 1.05),
        (
            {
                "quant_method": "modelopt",
                "quant_algo": "MIXED_PRECISION",
                "quantized_layers": {"a": {"quant_algo": "W4A8_MXFP4_FP8"}, "b": {"quant_algo": "FP8"}},
            },
            1.0,
            1.05,
        ),
    ],
)
def test_quantised_layers_weigh_less_and_embeddings_do_not(
    quantised: dict[str, Any], least: float, most: float
) -> None:
    plain, small = (
        model_of({**CONFIGS["llama"].to_dict(), **more}) for more in ({}, {"quantization_config": quantised})
    )
    embeddings = 2 * 1000 * 256
    layers = plain.num_weights - embeddings
    assert least <= (small.total_bytes - 2 * embeddings) / layers <= most


def test_nested_configurations_are_read() -> None:
    plain = CONFIGS["llama"].to_dict()
    assert model_of({"text_config": plain}) == model_of(plain)


@pytest.mark.parametrize("name", HYBRIDS)
def test_a_hybrid_keeps_the_state_that_the_engine_keeps(name: str, tmp_path: Path) -> None:
    config = HYBRIDS[name].to_dict()
    architecture = MODEL_FOR_CAUSAL_LM_MAPPING[type(HYBRIDS[name])].__name__
    (tmp_path / "config.json").write_text(json.dumps({**config, "architectures": [architecture]}))
    model, spec = read_model(tmp_path), read_spec(tmp_path)
    kept = spec.recurrent
    assert kept is not None
    assert model.state_bytes == sum(kept.has_state) * kept.shape.num_floats * 4
    assert model.kv_token_bytes == spec.kv_layout(16, "bfloat16").token_bytes
    with pytest.raises(KeyError):
        model_of({key: value for key, value in config.items() if not key.startswith(("mamba", "linear"))})


def test_what_cannot_be_read_is_said_with_the_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"config\.json"):
        read_model(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"hidden_size": 3}))
    with pytest.raises(ConfigError, match="num_hidden_layers"):
        read_model(tmp_path)
    (tmp_path / "config.json").write_text(
        json.dumps({**CONFIGS["llama"].to_dict(), "quantization_config": {"quant_method": "mystery"}})
    )
    with pytest.raises(ConfigError, match="mystery"):
        read_model(tmp_path)


def test_adapters_leave_so_much_less_room_for_kv() -> None:
    plain, block_bytes = named_model("llama-3.1-8b"), MODELS["llama-3.1-8b"].kv_token_bytes * 16
    adapted = named_model("llama-3.1-8b", 4096.0 * block_bytes)
    for num_gpus in (1, 2):
        without, beside = (num_blocks(GPUS["H100"], model, 16, num_gpus) for model in (plain, adapted))
        assert without - beside == pytest.approx(4096, abs=1)
    assert step_cost(GPUS["H100"], adapted) == step_cost(GPUS["H100"], plain)
