"""What a GGUF file's metadata says, in the words of transformers' config.json.

Each architecture has a line: the class of transformers, what `config.json` calls the file's keys, and what it means without
saying so. What llama.cpp's converter writes is what is read (its folder `conversion`); the keys are in its
`gguf-py/gguf/constants.py`.
`models.formats.gguf_names` has the tensors' names."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from core.errors import UnsupportedModel
from models.files import gguf_dense as dense
from models.files import gguf_latent as latent
from models.files import gguf_recurrent as recurrent
from models.files.gguf_reader import Gguf, most
from models.files.gguf_ropes import rope_of

Config = dict[str, Any]
_EACH: Final = {
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "max_position_embeddings": "context_length",
}
_EXPERTS: Final = {
    "num_experts_per_tok": "expert_used_count",
    "moe_intermediate_size": "expert_feed_forward_length",
}
_DEEPSEEK: Final = {
    **_EXPERTS,
    "n_routed_experts": "expert_count",
    "n_shared_experts": "expert_shared_count",
    "first_k_dense_replace": "leading_dense_block_count",
    "routed_scaling_factor": "expert_weights_scale",
    "norm_topk_prob": "expert_weights_norm",
    "n_group": "expert_group_count",
    "topk_group": "expert_group_used_count",
}
_GRANITE: Final = {
    "attention_multiplier": "attention.scale",
    "embedding_multiplier": "embedding_scale",
    "residual_multiplier": "residual_scale",
    "logits_scaling": "logit_scale",
}
_WINDOW: Final = {"sliding_window": "attention.sliding_window"}
_CAPS: Final = {
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
}


@dataclass(frozen=True, slots=True)
class Architecture:
    model: str
    """transformers' class"""
    says: Mapping[str, str] = field(default_factory=dict[str, str])
    """config.json's key -> the file's, behind the architecture's name; those that the file lacks are left out"""
    means: Mapping[str, Any] = field(default_factory=Config)
    also: Callable[[Gguf, Config], Config] = lambda file, config: {}
    """What else config.json says, given what is known."""


def config_of(file: Gguf) -> Config:
    """Return config.json's content, but for the ends of texts. Raises UnsupportedModel."""
    known = ARCHITECTURES.get(file.architecture)
    if known is None:
        raise UnsupportedModel(
            f"{file.name} has the architecture {file.architecture!r}: of GGUF {', '.join(ARCHITECTURES)} are supported"
        )
    said = {
        key: found for key, name in {**_EACH, **known.says}.items() if (found := file.get(name)) is not None
    }
    config: Config = {
        "architectures": [known.model],
        "vocab_size": int(file.tensors["token_embd.weight"].shape[-1]),
        "num_hidden_layers": file.need("block_count") - file.get("nextn_predict_layers", 0),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "dtype": "float16",
        **known.means,
        **{key: most(value) for key, value in said.items()},
    }
    config.setdefault("head_dim", config["hidden_size"] // config["num_attention_heads"])
    config["rope_parameters"] = rope_of(file, config["head_dim"])
    return config | known.also(file, config)


_LOCAL_EXPERTS: Final = {"num_local_experts": "expert_count", "num_experts_per_tok": "expert_used_count"}
_QWEN_EXPERTS: Final = {**_EXPERTS, "num_experts": "expert_count"}
_QWEN_SHARED: Final = {
    **_QWEN_EXPERTS,
    "shared_expert_intermediate_size": "expert_shared_feed_forward_length",
}
_QWEN3_MOE: Final = Architecture("Qwen3MoeForCausalLM", _QWEN_EXPERTS, {"norm_topk_prob": True}, dense.biases)
ARCHITECTURES: Final = {
    "llama": Architecture("LlamaForCausalLM", also=dense.llama),
    "mistral3": Architecture("Ministral3ForCausalLM", also=dense.ministral3),
    "qwen2": Architecture("Qwen2ForCausalLM"),
    "qwen2moe": Architecture(
        "Qwen2MoeForCausalLM",
        _QWEN_SHARED,
        {"norm_topk_prob": False},
        lambda file, _: {"qkv_bias": file.has("attn_q.bias")},
    ),
    "qwen3": Architecture("Qwen3ForCausalLM", also=dense.biases),
    "qwen3moe": _QWEN3_MOE,
    "gemma2": Architecture("Gemma2ForCausalLM", {**_WINDOW, **_CAPS}, also=dense.gemma2),
    "gemma3": Architecture("Gemma3ForCausalLM", {**_WINDOW, **_CAPS}, also=dense.gemma3),
    "qwen2vl": Architecture("Qwen2ForCausalLM"),
    "qwen3vl": Architecture("Qwen3ForCausalLM", also=dense.biases),
    "qwen3vlmoe": _QWEN3_MOE,
    "phi3": Architecture("Phi3ForCausalLM", _WINDOW, also=dense.phi3),
    "granite": Architecture("GraniteForCausalLM", _GRANITE, also=dense.biases),
    "granitemoe": Architecture("GraniteMoeForCausalLM", _GRANITE, also=dense.granite_moe),
    "olmo2": Architecture("Olmo2ForCausalLM", _WINDOW, also=dense.olmo),
    "smollm3": Architecture("SmolLM3ForCausalLM", means={"no_rope_layer_interval": 4}, also=dense.biases),
    "seed_oss": Architecture("SeedOssForCausalLM", also=dense.biases),
    "exaone4": Architecture("Exaone4ForCausalLM", _WINDOW, also=dense.exaone4),
    "ernie4_5": Architecture("Ernie4_5ForCausalLM", also=lambda file, _: {"use_bias": file.has("attn_q.bias")}),
    "ernie4_5-moe": Architecture(
        "Ernie4_5_MoeForCausalLM",
        {
            "moe_num_experts": "expert_count",
            "moe_k": "expert_used_count",
            "moe_intermediate_size": "expert_feed_forward_length",
            "moe_layer_interval": "interleave_moe_layer_step",
            "moe_layer_start_index": "leading_dense_block_count",
            "moe_num_shared_experts": "expert_shared_count",
        },
        {"moe_layer_interval": 1, "moe_layer_start_index": 0, "moe_layer_end_index": -1, "moe_num_shared_experts": 0},
    ),
    "command-r": Architecture(
        "CohereForCausalLM",
        {"layer_norm_eps": "attention.layer_norm_epsilon", "logit_scale": "logit_scale"},
        also=lambda file, config: dense.biases(file, config) | {"use_qk_norm": file.has("attn_q_norm.weight")},
    ),
    "cohere2": Architecture(
        "Cohere2ForCausalLM",
        {**_WINDOW, "layer_norm_eps": "attention.layer_norm_epsilon", "logit_scale": "logit_scale"},
        also=lambda file, config: dense.biases(file, config) | dense.layer_types(file, config),
    ),
    "glm4": Architecture("Glm4ForCausalLM", also=dense.biases),
    "glm4moe": Architecture("Glm4MoeForCausalLM", _DEEPSEEK, also=dense.glm4_moe),
    "hunyuan-dense": Architecture("HunYuanDenseV1ForCausalLM", also=dense.biases),
    "hunyuan-moe": Architecture(
        "HunYuanMoEV1ForCausalLM",
        {"num_experts": "expert_count", "moe_topk": "expert_used_count", "intermediate_size": "expert_feed_forward_length"},
        also=dense.biases,
    ),
    "dots1": Architecture("Dots1ForCausalLM", _DEEPSEEK, {"sliding_window": None}, dense.biases),
    "minimax-m2": Architecture("MiniMaxM2ForCausalLM", _LOCAL_EXPERTS, also=dense.minimax),
    "gpt-oss": Architecture("GptOssForCausalLM", {**_WINDOW, **_LOCAL_EXPERTS}, also=dense.gpt_oss),
    "deepseek2": Architecture("DeepseekV2ForCausalLM", _DEEPSEEK, also=latent.deepseek),
    "glm-dsa": Architecture("GlmMoeDsaForCausalLM", _DEEPSEEK, also=latent.glm_dsa),
    "mistral4": Architecture("Mistral4ForCausalLM", _DEEPSEEK, also=latent.mistral4),
    "kimi-linear": Architecture("KimiLinearForCausalLM", _DEEPSEEK, also=recurrent.kimi_linear),
    "qwen3next": Architecture("Qwen3NextForCausalLM", _QWEN_SHARED, {"norm_topk_prob": True}, recurrent.linear),
    "qwen35": Architecture("Qwen3_5ForCausalLM", also=recurrent.linear),
    "qwen35moe": Architecture("Qwen3_5MoeForCausalLM", _QWEN_SHARED, also=recurrent.linear),
    "lfm2": Architecture("Lfm2ForCausalLM", {"conv_L_cache": "shortconv.l_cache"}, also=recurrent.lfm2),
    "lfm2moe": Architecture(
        "Lfm2MoeForCausalLM",
        {
            **_EXPERTS,
            "conv_L_cache": "shortconv.l_cache",
            "num_experts": "expert_count",
            "num_dense_layers": "leading_dense_block_count",
        },
        also=recurrent.lfm2,
    ),
    "granitehybrid": Architecture("GraniteMoeHybridForCausalLM", _GRANITE, also=recurrent.granite_hybrid),
    "nemotron_h": Architecture("NemotronHForCausalLM", also=recurrent.nemotron_h),
    "nemotron_h_moe": Architecture(
        "NemotronHForCausalLM",
        {**_DEEPSEEK, "moe_shared_expert_intermediate_size": "expert_shared_feed_forward_length"},
        also=recurrent.nemotron_h,
    ),
    "llama4": Architecture(
        "Llama4ForCausalLM",
        {**_LOCAL_EXPERTS, "interleave_moe_layer_step": "interleave_moe_layer_step"},
        also=dense.llama4,
    ),
    "gemma4": Architecture(
        "Gemma4ForCausalLM",
        {**_WINDOW, **_CAPS, "moe_intermediate_size": "expert_feed_forward_length"},
        also=dense.gemma4,
    ),
}  # fmt: skip
"""By the file's `general.architecture`."""
