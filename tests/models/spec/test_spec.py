"""config.json and generation_config.json: what is read, what is assumed, what is refused."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from core.errors import ConfigError, UnsupportedModel
from models.families.table import read_spec
from models.registry import choose_dtype, load_model
from models.spec.model_spec import ModelSpec

CPU, GPU = torch.device("cpu"), torch.device("cuda")
SIZES: dict[str, Any] = {
    "vocab_size": 10,
    "hidden_size": 64,
    "intermediate_size": 16,
    "num_hidden_layers": 4,
    "num_attention_heads": 32,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 64,
}
CLASSES = {
    "LlamaForCausalLM": transformers.LlamaConfig,
    "MistralForCausalLM": transformers.MistralConfig,
    "Qwen2ForCausalLM": transformers.Qwen2Config,
    "Qwen3ForCausalLM": transformers.Qwen3Config,
    "Gemma2ForCausalLM": transformers.Gemma2Config,
    "GraniteForCausalLM": transformers.GraniteConfig,
    "Olmo2ForCausalLM": transformers.Olmo2Config,
    "Phi3ForCausalLM": transformers.Phi3Config,
    "GlmForCausalLM": transformers.GlmConfig,
    "Glm4ForCausalLM": transformers.Glm4Config,
    "GraniteMoeForCausalLM": transformers.GraniteMoeConfig,
    "MixtralForCausalLM": transformers.MixtralConfig,
    "Qwen2MoeForCausalLM": transformers.Qwen2MoeConfig,
    "Qwen3MoeForCausalLM": transformers.Qwen3MoeConfig,
    "GptOssForCausalLM": transformers.GptOssConfig,
}


def spec_of(folder: Path, architecture: str = "LlamaForCausalLM", **fields: Any) -> ModelSpec:
    (folder / "config.json").write_text(json.dumps({"architectures": [architecture], **SIZES, **fields}))
    return read_spec(folder)


@pytest.mark.parametrize("architecture", CLASSES)
def test_a_silent_config_means_what_transformers_takes_it_to_mean(architecture: str, tmp_path: Path) -> None:
    spec = spec_of(tmp_path, architecture)
    theirs = CLASSES[architecture](**SIZES)
    assert spec.num_kv_heads == theirs.num_key_value_heads
    assert spec.head_dim == (getattr(theirs, "head_dim", None) or 2)
    assert spec.tied == theirs.tie_word_embeddings
    assert spec.rope.theta == theirs.rope_parameters["rope_theta"]
    window = getattr(theirs, "sliding_window", None) or 0
    kinds = getattr(theirs, "layer_types", None) or ["sliding_attention"] * spec.num_layers
    assert spec.windows == tuple(window if kind == "sliding_attention" else 0 for kind in kinds)
    assert spec.attention_soft_cap == getattr(theirs, "attn_logit_softcapping", 0.0)
    assert spec.logit_soft_cap == getattr(theirs, "final_logit_softcapping", 0.0)


@pytest.mark.parametrize(
    ("architecture", "theirs"),
    [
        ("DeepseekV2ForCausalLM", transformers.DeepseekV2Config),
        ("DeepseekV3ForCausalLM", transformers.DeepseekV3Config),
        ("DeepseekV32ForCausalLM", transformers.DeepseekV32Config),
        ("GlmMoeDsaForCausalLM", transformers.GlmMoeDsaConfig),
    ],
)
def test_a_silent_deepseek_config(architecture: str, theirs: Any, tmp_path: Path) -> None:
    spec = spec_of(tmp_path, architecture, num_experts_per_tok=2)
    meant = theirs(**SIZES, num_experts_per_tok=2)
    assert spec.mla is not None
    assert spec.moe is not None
    assert (spec.num_kv_heads, spec.head_dim) == (1, meant.qk_nope_head_dim + meant.qk_rope_head_dim)
    assert (spec.mla.q_rank, spec.mla.kv_rank) == (meant.q_lora_rank, meant.kv_lora_rank)
    assert (spec.mla.rope_dim, spec.mla.value_dim) == (meant.qk_rope_head_dim, meant.v_head_dim)
    assert (spec.moe.num_experts, spec.moe.intermediate_size) == (
        meant.n_routed_experts,
        meant.moe_intermediate_size,
    )
    assert spec.moe.shared_size == meant.n_shared_experts * meant.moe_intermediate_size
    assert spec.moe.sparse == tuple(i >= meant.first_k_dense_replace for i in range(4))
    assert (spec.moe.routing.scale, spec.moe.routing.num_groups) == (
        meant.routed_scaling_factor,
        meant.n_group or 1,
    )
    assert (spec.qkv_bias, spec.mlp_bias, spec.tied) == (False, False, False)


def test_a_silent_gemma3_config(tmp_path: Path) -> None:
    """Published ones say little more than this."""
    theirs = transformers.Gemma3TextConfig()
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["Gemma3ForCausalLM"]}))
    spec = read_spec(tmp_path)
    sizes = ("vocab_size", "hidden_size", "intermediate_size", "head_dim", "max_position_embeddings")
    ours = spec.vocab_size, spec.hidden_size, spec.intermediate_size, spec.head_dim, spec.max_context_tokens
    assert ours == tuple(getattr(theirs, name) for name in sizes)
    assert (spec.num_layers, spec.num_heads, spec.num_kv_heads) == (
        theirs.num_hidden_layers,
        theirs.num_attention_heads,
        theirs.num_key_value_heads,
    )
    assert (spec.tied, spec.norm_eps) == (theirs.tie_word_embeddings, theirs.rms_norm_eps)
    assert spec.attention_scale == theirs.query_pre_attn_scalar**-0.5
    rotations = theirs.rope_parameters
    for window, rope, kind in zip(spec.windows, spec.layer_ropes, theirs.layer_types, strict=True):
        assert window == (theirs.sliding_window if kind == "sliding_attention" else 0)
        assert (rope.kind, rope.theta) == (rotations[kind]["rope_type"], rotations[kind]["rope_theta"])


def test_a_silent_olmo3_config(tmp_path: Path) -> None:
    spec, theirs = spec_of(tmp_path, "Olmo3ForCausalLM"), transformers.Olmo3Config(**SIZES)
    assert (spec.num_kv_heads, spec.head_dim, spec.tied) == (32, 2, theirs.tie_word_embeddings)
    for window, rope, kind in zip(spec.windows, spec.layer_ropes, theirs.layer_types, strict=True):
        assert window == (theirs.sliding_window if kind == "sliding_attention" else 0)
        assert rope.theta == theirs.rope_parameters[kind]["rope_theta"]


def test_rotations_by_layer_type_are_those_of_both_generations(tmp_path: Path) -> None:
    """As google/gemma-3-12b-it's config.json says them, and as transformers 5 writes them."""
    scaling = {"rope_type": "linear", "factor": 8.0}
    old = {"rope_theta": 2e6, "rope_local_base_freq": 3e4, "rope_scaling": scaling}
    theirs = transformers.Gemma3TextConfig(**{**SIZES, "num_hidden_layers": 6}, **old)
    new = {"rope_parameters": theirs.rope_parameters}
    for fields in (old, new):
        spec = spec_of(tmp_path, "Gemma3ForCausalLM", **{**fields, "num_hidden_layers": 6})
        for rope, kind in zip(spec.layer_ropes, theirs.layer_types, strict=True):
            said = theirs.rope_parameters[kind]
            assert (rope.kind, rope.theta) == (said["rope_type"], said["rope_theta"])
            assert rope.parameters.get("factor") == said.get("factor")


def test_longrope_by_its_first_names(tmp_path: Path) -> None:
    """As microsoft/Phi-3-mini-128k-instruct's config.json has had it."""
    for name in ("su", "yarn", "longrope"):
        scaling = {"type": name, "short_factor": [1.0], "long_factor": [2.0]}
        rope = spec_of(tmp_path, "Phi3ForCausalLM", rope_scaling=scaling).rope
        assert (rope.kind, rope.parameters["long_factor"]) == ("longrope", [2.0])
        assert rope.parameters["original_max_position_embeddings"] == 4096


def test_a_silent_granite_config(tmp_path: Path) -> None:
    names = ["mamba", "attention"] * 2
    spec = spec_of(tmp_path, "GraniteMoeHybridForCausalLM", layer_types=names)
    meant = transformers.GraniteMoeHybridConfig(**SIZES, layer_types=names)
    assert spec.recurrent is not None
    assert spec.moe is not None
    shape = spec.recurrent.shape
    assert spec.recurrent.kinds == ("state_space", "kv") * 2
    assert (shape.num_key_heads, shape.num_value_heads) == (meant.mamba_n_groups, meant.mamba_n_heads)
    assert (shape.key_dim, shape.value_dim) == (meant.mamba_d_state, meant.mamba_d_head)
    assert shape.conv_kernel == meant.mamba_d_conv
    assert (spec.recurrent.conv_bias, spec.recurrent.projection_bias) == (True, False)
    assert (spec.moe.num_experts, spec.moe.routing.top_k) == (
        meant.num_local_experts,
        meant.num_experts_per_tok,
    )
    assert spec.moe.shared_size == spec.intermediate_size == meant.shared_intermediate_size
    assert (spec.attention_scale, spec.embedding_scale, spec.residual_scale, spec.logit_divisor) == (1.0,) * 4
    assert (spec.rope.kind, spec.tied) == ("none", meant.tie_word_embeddings)


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"time_step_limit": [0.001, 0.1]}, "time_step_limit"),
        ({"layer_types": ["mamba"] * 4}, "no layer attends"),
        ({"layer_types": ["attention", "conv"] * 2}, "layer type 'conv'"),
        ({"mamba_n_heads": 3}, "mamba_n_heads 3 times mamba_d_head 42 is not"),
        ({"mamba_n_groups": 3}, "128 value heads.*no multiple of 3"),
        ({"hidden_act": "gelu_pytorch_tanh"}, "hidden_act 'gelu_pytorch_tanh'"),
        ({"residual_multiplier": 0}, "residual_multiplier is 0"),
    ],
)
def test_what_granite_cannot_do_is_named(fields: dict[str, Any], named: str, tmp_path: Path) -> None:
    names = {"layer_types": ["mamba", "attention"] * 2, **fields}
    with pytest.raises(UnsupportedModel, match=named):
        spec_of(tmp_path, "GraniteMoeHybridForCausalLM", **names)


def test_infinity_is_read_however_it_is_written(tmp_path: Path) -> None:
    names = ["mamba", "attention"] * 2
    for bound in (float("inf"), {"__float__": "Infinity"}):
        limits = {"time_step_limit": [0.0, bound]}
        assert spec_of(tmp_path, "GraniteMoeHybridForCausalLM", layer_types=names, **limits).recurrent


def test_null_is_not_silence(tmp_path: Path) -> None:
    assert spec_of(tmp_path, "MistralForCausalLM", sliding_window=None).windows == (0,) * 4
    gemma = spec_of(tmp_path, "Gemma2ForCausalLM", attn_logit_softcapping=None, final_logit_softcapping=None)
    assert gemma.attention_soft_cap == gemma.logit_soft_cap == 0.0


def test_names_of_both_generations(tmp_path: Path) -> None:
    old = spec_of(
        tmp_path, torch_dtype="bfloat16", rope_theta=7.0, rope_scaling={"type": "linear", "factor": 2.0}
    )
    new = spec_of(
        tmp_path, dtype="bfloat16", rope_parameters={"rope_type": "linear", "factor": 2.0, "rope_theta": 7.0}
    )
    assert old.dtype == new.dtype == "bfloat16"
    assert (old.rope.kind, old.rope.theta) == (new.rope.kind, new.rope.theta) == ("linear", 7.0)
    assert old.rope.parameters["factor"] == new.rope.parameters["factor"] == 2.0


def test_windows_of_qwen_layers(tmp_path: Path) -> None:
    sliding = {"use_sliding_window": True, "sliding_window": 9}
    assert spec_of(tmp_path, "Qwen2ForCausalLM", **sliding, max_window_layers=3).windows == (0, 0, 0, 9)
    assert spec_of(tmp_path, "Qwen2ForCausalLM", sliding_window=9, max_window_layers=0).windows == (0,) * 4
    kinds = ["sliding_attention", "full_attention"] * 2
    assert spec_of(tmp_path, "Qwen3ForCausalLM", **sliding, layer_types=kinds).windows == (9, 0, 9, 0)


def test_kv_layout(tmp_path: Path) -> None:
    layout = spec_of(tmp_path, num_key_value_heads=8, head_dim=20).kv_layout(16, "bfloat16")
    assert layout.token_bytes == 2 * 4 * 8 * 20 * 2
    assert layout.block_size == 16


def test_latent_kv_layout(tmp_path: Path) -> None:
    """576 numbers for each token and layer, whatever the heads: DeepSeek-V3's cache."""
    layout = spec_of(tmp_path, "DeepseekV3ForCausalLM").kv_layout(16, "bfloat16")
    assert (layout.state, layout.num_kv_heads, layout.head_dim) == ("mla", 1, 576)
    assert layout.token_bytes == 4 * 576 * 2


def test_generation_config(tmp_path: Path) -> None:
    assert spec_of(tmp_path, eos_token_id=0).eos_token_ids == (0,)
    assert spec_of(tmp_path).eos_token_ids == ()
    (tmp_path / "generation_config.json").write_text(
        json.dumps(
            {"eos_token_id": [3, 5], "do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": None}
        )
    )
    spec = spec_of(tmp_path, eos_token_id=0)
    assert spec.eos_token_ids == (3, 5, 0)
    assert spec.default_sampling == {"temperature": 0.6, "top_k": 20.0}
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": null, "do_sample": false}')
    spec = spec_of(tmp_path, eos_token_id=7)
    assert spec.eos_token_ids == (7,)
    assert spec.default_sampling == {"temperature": 0.0}


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"architectures": ["MambaForCausalLM"]}, "MambaForCausalLM"),
        ({"architectures": None}, "architecture"),
        ({"quantization_config": {"quant_method": "gptq"}}, r"quantization_config \(gptq"),
        ({"hidden_act": "relu"}, "'relu'"),
        ({"rope_scaling": {"rope_type": "longrope"}}, "'longrope'"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5"),
        ({"architectures": ["Gemma2ForCausalLM"], "use_bidirectional_attention": True}, "use_bidirectional"),
        (
            {"architectures": ["Gemma2ForCausalLM"], "layer_types": ["chunked_attention"] * 4},
            "chunked_attention",
        ),
        (
            {"architectures": ["MistralForCausalLM"], "layer_types": ["full_attention"]},
            "layer_types has 1 entries",
        ),
        ({"num_key_value_heads": 5}, "num_attention_heads 32 is no multiple of num_key_value_heads 5"),
        ({"head_dim": 7}, "head_dim 7 is odd"),
        (
            {"architectures": ["MixtralForCausalLM"], "num_experts_per_tok": 9},
            "num_experts_per_tok 9 is more than the 8 experts to choose from",
        ),
        (
            {"architectures": ["DeepseekV3ForCausalLM"], "n_group": 7},
            "256 experts cannot be divided into n_group 7",
        ),
        (
            {"architectures": ["DeepseekV3ForCausalLM"], "topk_group": 9},
            "topk_group 9 is not between 1 and n_group 8",
        ),
        (
            {"architectures": ["DeepseekV3ForCausalLM"], "n_group": 256, "topk_group": 256},
            "n_group 256 leaves 1 experts",
        ),
        ({"architectures": ["DeepseekV3ForCausalLM"], "scoring_func": "softmax"}, "scoring_func 'softmax'"),
        ({"architectures": ["DeepseekV3ForCausalLM"], "moe_layer_freq": 2}, "moe_layer_freq 2"),
        ({"architectures": ["DeepseekV3ForCausalLM"], "qk_rope_head_dim": 7}, "head_dim 7 is odd"),
        (
            {"architectures": ["DeepseekV2ForCausalLM"], "num_experts_per_tok": 2, "topk_method": "best"},
            "topk_method 'best'",
        ),
        (
            {"architectures": ["DeepseekV2ForCausalLM"], "num_experts_per_tok": 2, "norm_topk_prob": True},
            "norm_topk_prob",
        ),
        (
            {"architectures": ["Gemma3ForCausalLM"], "attn_logit_softcapping": 50.0},
            "attn_logit_softcapping is not supported",
        ),
        (
            {"architectures": ["Gemma3ForCausalLM"], "rope_parameters": {"rope_theta": 1e6}},
            "rope_parameters are not given by layer type",
        ),
        (
            {"rope_parameters": {"full_attention": {"rope_type": "default"}}},
            "differ by layer type are not supported in this family",
        ),
        (
            {"rope_scaling": {"rope_type": "longrope", "short_factor": [1], "long_factor": [0]}},
            "'longrope' needs positive numbers as 'long_factor'",
        ),
        (
            {
                "architectures": ["Phi3ForCausalLM"],
                "rope_scaling": {"type": "su", "short_factor": [1], "long_factor": [1, 2]},
            },
            "long_factor has 2 numbers for 1 rotated pairs",
        ),
        (
            {"architectures": ["Phi3ForCausalLM"], "partial_rotary_factor": 0.5},
            "partial_rotary_factor 0.5 rotates 1 of 2 dimensions",
        ),
        ({"architectures": ["GraniteForCausalLM"], "logits_scaling": 0}, "logits_scaling is 0"),
        ({"vocab_size": None}, "vocab_size is None"),
        ({"num_attention_heads": 0}, "num_attention_heads is 0"),
        ({"rms_norm_eps": "small"}, "wrong kind.*'small'"),
    ],
)
def test_what_is_not_supported_is_named_before_any_weight_is_read(
    fields: dict[str, Any], named: str, tmp_path: Path
) -> None:
    """The folder has no weights: had they been looked for first, that would be the error."""
    (tmp_path / "config.json").write_text(
        json.dumps({"architectures": ["LlamaForCausalLM"], **SIZES, **fields})
    )
    with pytest.raises(UnsupportedModel, match=named):
        load_model(tmp_path, "float32", CPU)


@pytest.mark.parametrize("key", SIZES)
def test_a_missing_key_is_named(key: str, tmp_path: Path) -> None:
    config = {"architectures": ["LlamaForCausalLM"], **SIZES}
    del config[key]
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UnsupportedModel, match=f"lacks '{key}'"):
        read_spec(tmp_path)


def test_files_that_are_no_config(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"it has no config\.json"):
        read_spec(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ConfigError, match="cannot read"):
        read_spec(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ConfigError, match="JSON object"):
        read_spec(tmp_path)


def test_dtype(tmp_path: Path) -> None:
    spec = spec_of(tmp_path, dtype="float16")
    assert choose_dtype(spec, "auto", CPU) == "float32"
    for own in ("bfloat16", "float16", "float32"):
        assert choose_dtype(spec_of(tmp_path, dtype=own), "auto", GPU) == own
        assert choose_dtype(spec, own, CPU) == own
    with pytest.raises(UnsupportedModel, match="'float64'"):
        choose_dtype(spec, "float64", CPU)


def test_which_part_of_the_experts_a_token_draws_is_known(tmp_path: Path) -> None:
    assert spec_of(tmp_path).expert_share == 0.0
    assert spec_of(tmp_path, "MixtralForCausalLM").expert_share == 2 / 8
