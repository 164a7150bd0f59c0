"""A tiny configuration of each architecture that GGUF files have, shaped as published models are."""

import random
from dataclasses import dataclass, field
from typing import Any, Final

from tests.models.checkpoints import FAMILIES, HYBRID
from tests.models.gemma4_families import fields
from tests.models.gguf_files import NUM_TOKENS

_SIZES: Final = {
    "vocab_size": NUM_TOKENS,
    "hidden_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "intermediate_size": 96,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "attention_bias": False,
    "mlp_bias": False,
}
_TIED: Final = {"tie_word_embeddings": True}
_YARN: Final = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 32,
}


_DELTA: Final = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
}
_GEMMA4: Final = {
    **{
        name: size
        for name, size in _SIZES.items()
        if name
        in (
            "vocab_size",
            "hidden_size",
            "num_attention_heads",
            "num_key_value_heads",
            "head_dim",
            "intermediate_size",
            "attention_bias",
        )
    },
    **_TIED,
    "num_hidden_layers": 4,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "global_head_dim": 64,
    "num_global_key_value_heads": 1,
    "sliding_window": 16,
}
_OF: Final = {"lfm2_moe": ("lfm2", 1), "nemotron_h_moe": ("nemotron_h", 1)}
"""Families that tests have by turns with others."""


@dataclass(frozen=True)
class Case:
    architecture: str
    family: str
    sizes: dict[str, Any] = field(default_factory=dict[str, Any])

    @property
    def name(self) -> str:
        same = self.family.replace("_", "") == self.architecture.replace("-", "").replace("_", "")
        return self.architecture if same else f"{self.architecture} ({self.family})"

    def config(self) -> Any:
        family, turn = _OF.get(self.family, (self.family, 0))
        config = {**FAMILIES, **HYBRID}[family](random.Random(0), turn)
        if config.model_type == "gemma4_text":
            return type(config)(**{**fields(random.Random(0), 0), **_GEMMA4, **self.sizes})
        for name, size in {**_SIZES, **self.sizes}.items():
            if hasattr(config, name):
                setattr(config, name, size)
        return config


def _latent(**sizes: Any) -> dict[str, Any]:
    return {
        "num_key_value_heads": 4, "q_lora_rank": 24, "kv_lora_rank": 64, "qk_nope_head_dim": 32, "qk_rope_head_dim": 16, "v_head_dim": 32, "head_dim": 16,
            "qk_head_dim": 48, **sizes}  # fmt: skip


def _phi3() -> dict[str, Any]:
    lists = {name: [1.0 + at / 8 for at in range(12)] for name in ("short_factor", "long_factor")}
    rope = {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "partial_rotary_factor": 0.75,
        "factor": 4.0,
        "original_max_position_embeddings": 32,
    }
    return {"original_max_position_embeddings": 32, "rope_parameters": {**rope, **lists}}


CASES: Final = {
    case.name: case
    for case in (
        Case("llama", "llama"),
        Case("llama", "mixtral"),
        Case("mistral3", "ministral3", {"rope_parameters": {**_YARN, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1}}),
        Case("qwen2", "qwen2"),
        Case("qwen2moe", "qwen2_moe", {"norm_topk_prob": False}),
        Case("qwen3", "qwen3"),
        Case("qwen3moe", "qwen3_moe"),
        Case("qwen2vl", "qwen2"),
        Case("qwen3vl", "qwen3"),
        Case("qwen3vlmoe", "qwen3_moe"),
        Case("gemma2", "gemma2", {**_TIED, "attn_logit_softcapping": 5.0, "final_logit_softcapping": 7.0, "query_pre_attn_scalar": 32}),
        Case("gemma3", "gemma3", {**_TIED, "query_pre_attn_scalar": 32, "num_hidden_layers": 7, "final_logit_softcapping": None,
            "layer_types": ["sliding_attention"] * 5 + ["full_attention", "sliding_attention"],
            "rope_parameters": {"full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
                                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4}}}),
        Case("phi3", "phi3", _phi3()),
        Case("granite", "granite"),
        Case("granitemoe", "granite_moe"),
        Case("olmo2", "olmo2"),
        Case("olmo2", "olmo3", {"num_hidden_layers": 5, "layer_types": ["sliding_attention"] * 3 + ["full_attention", "sliding_attention"]}),
        Case("smollm3", "smollm3"),
        Case("seed_oss", "seed_oss", {"attention_bias": True}),
        Case("exaone4", "exaone4", {"sliding_window": None, "layer_types": ["full_attention"] * 5}),
        Case("ernie4_5", "ernie4_5"),
        Case("ernie4_5-moe", "ernie4_5_moe"),
        Case("command-r", "cohere", _TIED),
        Case("cohere2", "cohere2", _TIED),
        Case("glm4", "glm4", {"attention_bias": True}),
        Case("glm4moe", "glm4_moe", {"attention_bias": True}),
        Case("hunyuan-dense", "hunyuan"),
        Case("hunyuan-moe", "hunyuan_moe"),
        Case("dots1", "dots1", {"num_key_value_heads": 4}),
        Case("minimax-m2", "minimax_m2"),
        Case("gpt-oss", "gpt_oss", {"attention_bias": True, "swiglu_limit": 7.0,
            "rope_parameters": {"rope_type": "default", "rope_theta": 150000.0}}),
        Case("deepseek2", "deepseek_v2", _latent()),
        Case("deepseek2", "deepseek_v3", _latent()),
        Case("deepseek2", "glm4_moe_lite", _latent()),
        Case("glm-dsa", "glm_moe_dsa", _latent()),
        Case("mistral4", "mistral4", _latent(rope_parameters={**_YARN, "mscale": 1.0, "mscale_all_dim": 1.0,
            "llama_4_scaling_beta": 0.1, "partial_rotary_factor": 1 / 3}, head_dim=48)),
        Case("kimi-linear", "kimi_linear", _latent(linear_num_heads=4, q_lora_rank=None)),
        Case("qwen3next", "qwen3_next", _DELTA),
        Case("qwen35", "qwen3_5", _DELTA),
        Case("qwen35moe", "qwen3_5_moe", _DELTA),
        Case("lfm2", "lfm2", {**_TIED, "block_auto_adjust_ff_dim": False}),
        Case("lfm2moe", "lfm2_moe", {**_TIED, "norm_topk_prob": True, "routed_scaling_factor": 1.0}),
        Case("granitehybrid", "granite_hybrid", {"mamba_n_heads": 16, "mamba_d_head": 16}),
        Case("nemotron_h", "nemotron_h"),
        Case("nemotron_h_moe", "nemotron_h_moe"),
        Case("llama4", "llama4", {"attention_chunk_size": 8192, "floor_scale": 8192, "attn_scale": 0.1,
            "rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}),
        Case("gemma4", "gemma4"),
        Case("gemma4", "gemma4_moe", {"enable_moe_block": True, "num_experts": 8, "top_k_experts": 3, "moe_intermediate_size": 32}),
        Case("gemma4", "gemma4_small", {"hidden_size_per_layer_input": 32, "vocab_size_per_layer_input": NUM_TOKENS,
            "num_kv_shared_layers": 3, "use_double_wide_mlp": True, "attention_k_eq_v": False,
            "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2, "num_hidden_layers": 6}),
    )
}  # fmt: skip
