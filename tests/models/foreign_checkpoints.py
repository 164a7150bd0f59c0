"""Tiny models of architectures that Baton has no code for, made by transformers."""

import inspect
from pathlib import Path
from typing import Any

import torch
import transformers

VOCAB = 128
_SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 192,
    "sliding_window": 6,
    "tie_word_embeddings": False,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "moe_num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_topk": 2,
    "moe_intermediate_size": 48,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "n_embd": 64,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 192,
}
_LATENT: dict[str, Any] = {
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "head_dim": 8,
    "num_key_value_heads": 4,
}


def make_foreign(folder: Path, architecture: str, **others: int) -> Any:
    """The reference; its checkpoint is in `folder`. `others`: sizes that are not as usual."""
    kind = getattr(transformers, architecture)
    known = set(inspect.signature(kind.config_class.__init__).parameters)
    known |= set(getattr(kind.config_class, "__dataclass_fields__", {}))
    sizes = {**_SIZES, **(_LATENT if "qk_rope_head_dim" in known else {}), **others}
    torch.manual_seed(1)
    model = kind(kind.config_class(**{key: size for key, size in sizes.items() if key in known})).eval()
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.2)
    model.save_pretrained(folder)
    return model
