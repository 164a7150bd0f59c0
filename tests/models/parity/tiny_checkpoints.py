"""A tiny random checkpoint of any causal language model that transformers has.

Sizes go by the names of a configuration's fields. `_OF_MODEL` has what some models want beside that."""

import inspect
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

VOCAB, LAYERS = 128, 4
_SPREAD, _MOST = 0.2, 20_000_000
_BY_VALUE: Sequence[tuple[int, str]] = (
    (VOCAB, "vocab_size vocab_size_per_layer_input vocab_size_pred unpadded_vocab_size"),
    (64, "hidden_size d_model n_embd embedding_size embedding_dim emb_dim word_embed_proj_dim input_embedding_size "
    "output_embedding_size ngram_vocab_size_base"),
    (LAYERS, "num_hidden_layers n_layer n_layers num_layers decoder_layers encoder_layers num_decoder_layers "
    "num_encoder_layers num_blocks max_window_layers"),
    (2, "depth"),
    (4, "num_attention_heads n_head n_heads num_heads decoder_attention_heads encoder_attention_heads "
    "num_decoder_attention_heads num_encoder_attention_heads attention_heads swa_num_attention_heads index_n_heads "
    "indexer_n_heads num_experts num_local_experts n_routed_experts moe_num_experts linear_num_value_heads linear_num_heads "
    "mamba_n_heads mamba_num_heads"),
    (2, "num_key_value_heads num_kv_heads swa_num_key_value_heads num_experts_per_tok num_experts_per_token moe_topk moe_k "
    "top_k_experts linear_num_key_heads n_groups mamba_n_groups moe_top_k kv_n_heads num_attention_groups"),
    (16, "head_dim kv_channels v_head_dim swa_head_dim global_head_dim linear_key_head_dim linear_value_head_dim linear_head_dim "
    "index_head_dim indexer_head_dim d_head dim_head attention_head_size mamba_d_state ssm_state_size state_size "
    "query_pre_attn_scalar attention_head_dim d_kv swa_v_head_dim"),
    (96, "intermediate_size decoder_ffn_dim encoder_ffn_dim ffn_dim n_inner d_inner dff dim_ff ffn_hidden_size "
    "feed_forward_size intermediate_size_mlp dense_intermediate_size"),
    (48, "moe_intermediate_size shared_expert_intermediate_size expert_ffn_hidden_size shared_intermediate_size "
    "moe_shared_expert_intermediate_size"),
    (192, "max_position_embeddings n_positions n_ctx max_seq_len seq_length context_length"),
    (6, "sliding_window sliding_window_size window_size attention_window_size local_attention attention_chunk_size"),
    (8, "qk_rope_head_dim qk_nope_head_dim hidden_size_per_layer_input mamba_chunk_size chunk_size"),
    (1, "n_group topk_group n_shared_experts num_shared_experts first_k_dense_replace bos_token_id num_dense_layers"),
    (24, "q_lora_rank lru_width"),
    (0, "pad_token_id num_mtp_layers num_nextn_predict_layers"),
)  # fmt: skip
_BY_NAME = {name: value for value, names in _BY_VALUE for name in names.split()} | {
    "kv_lora_rank": 16,
    "eos_token_id": None,
    "is_decoder": True,
    "tie_word_embeddings": False,
    "index_topk": 512,
    "lru_width": 64,
    "rotary_dim": 8,
    "encoder_hash_byte_group_vocab": 64,
    "ngram_vocab_size_base": 64,
}
_LATENT: Mapping[str, Any] = {"head_dim": 8, "num_key_value_heads": 4, "v_head_dim": 12}
"""Sizes of models that keep latents."""
_QWEN2: Mapping[str, Any] = {
    "model_type": "qwen2", "vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 192, "max_window_layers": 2,
}  # fmt: skip
_OF_MODEL: Mapping[str, Mapping[str, Any]] = {
    "BailingHybridForCausalLM": {"layer_group_size": 2},
    "BambaForCausalLM": {"attn_layer_indices": [1, 3]},
    "DbrxForCausalLM": {
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 8, "rope_theta": 1e4},
        "ffn_config": {"ffn_hidden_size": 48, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "DeepseekV4ForCausalLM": {
        "num_key_value_heads": 1, "o_groups": 2, "o_lora_rank": 16, "index_topk": 4, "index_n_heads": 8,
        "partial_rotary_factor": 0.5,
        "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 11},
    },
    "Dots3NoteForCausalLM": {"num_key_value_heads": 4},
    "FalconH1ForCausalLM": {"mamba_d_ssm": 64},
    "FuyuForCausalLM": {"text_config": {**_QWEN2, "model_type": "persimmon"}},
    "GPTNeoForCausalLM": {"attention_types": [[["global", "local"], 2]]},
    "Gemma3nForCausalLM": {
        "layer_types": ["sliding_attention", "full_attention"] * 2, "num_kv_shared_layers": 2,
        "activation_sparsity_pattern": [0.0] * LAYERS, "intermediate_size": [96] * LAYERS,
    },
    "Gemma4AssistantForCausalLM": {"hidden_size_per_layer_input": 0},
    "GotOcr2ForConditionalGeneration": {"text_config": _QWEN2},
    "GraniteMoeHybridForCausalLM": {"layer_types": ["mamba", "attention"] * 2},
    "JambaForCausalLM": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "KimiLinearForCausalLM": {"layer_types": ["linear_attention", "full_attention"] * 2},
    "Lfm2ForCausalLM": {"layer_types": ["conv", "full_attention"] * 2},
    "Lfm2MoeForCausalLM": {"layer_types": ["conv", "full_attention"] * 2},
    "Llama4ForCausalLM": {"num_experts_per_tok": 1, "attention_chunk_size": 8},
    "Mamba2ForCausalLM": {"num_heads": 8},
    "MoshiForCausalLM": {"audio_vocab_size": 32},
    "MossTranscribeDiarizeForConditionalGeneration": {"text_config": _QWEN2},
    "NemotronHForCausalLM": {"mamba_head_dim": 32},
    "ReformerModelWithLMHead": {"axial_pos_embds_dim": (16, 48), "axial_pos_shape": (8, 24)},
    "XmodForCausalLM": {"default_language": "en_XX"},
    "ZambaForCausalLM": {"num_key_value_heads": 4, "attention_head_dim": None},
    "Zamba2ForCausalLM": {
        "layers_block_type": ["linear_attention", "hybrid"] * 2, "num_key_value_heads": 4
    },
    "ZayaForCausalLM": {"num_experts_per_tok": 1},
    "xLSTMForCausalLM": {"chunk_size": 64},
}  # fmt: skip


def config_of(kind: Any) -> Any:
    """Return a tiny configuration of a class of transformers."""
    return _made(kind.config_class, _OF_MODEL.get(kind.__name__, {}))


def _made(config_class: Any, others: Mapping[str, Any]) -> Any:
    known = set(inspect.signature(config_class.__init__).parameters)
    known |= set(getattr(config_class, "__dataclass_fields__", {}))
    latent = _LATENT if "qk_rope_head_dim" in known else {}
    sizes = {name: value for name, value in {**_BY_NAME, **latent}.items() if name in known}
    for name, part in (getattr(config_class, "sub_configs", None) or {}).items():
        if hasattr(part, "sub_configs") and getattr(part, "model_type", ""):
            sizes[name] = _made(part, others if name == "text_config" else {}).to_dict()
    taken = others if "text_config" not in sizes else {key: others[key] for key in others if key in known}
    return config_class(**{**sizes, **taken})


def make_tiny(folder: Path, architecture: str) -> Any:
    """The reference; its checkpoint is in `folder`."""
    torch.manual_seed(1)
    kind = getattr(transformers, architecture)
    with torch.device("meta"):
        size = sum(one.numel() for one in kind._from_config(config_of(kind)).parameters())
    if size > _MOST:
        raise ValueError(f"it has {size:,} weights where all sizes are small that have known names")
    model = kind._from_config(config_of(kind), attn_implementation="eager").float().eval()
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            is_matrix = name.endswith(("weight", "_proj", "proj_weight")) and parameter.dim() > 1
            if is_matrix and not isinstance(module, nn.Conv1d):
                nn.init.normal_(parameter, std=_SPREAD)
            elif name == "bias":
                nn.init.normal_(parameter, std=0.1)
        if isinstance(module, nn.Embedding) and module.padding_idx is not None:
            module.weight.data[module.padding_idx] = 0.0  # as transformers loads it
    model.generation_config.eos_token_id = None
    model.save_pretrained(folder)
    return model


def causal_names() -> list[str]:
    """Return the names of all of transformers' causal language models."""
    return sorted(set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()), key=str.lower)
