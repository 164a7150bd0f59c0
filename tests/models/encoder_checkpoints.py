"""Tiny random encoders of every kind that is served."""

from typing import Any

_COMMON: dict[str, Any] = {
    "vocab_size": 99,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 140,
    "pad_token_id": 1,
}
_MARKS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
FIELDS: dict[str, dict[str, Any]] = {
    "albert": {**_COMMON, "embedding_size": 16},
    "bert": _COMMON,
    "camembert": _COMMON,
    "deberta-v2": _COMMON,
    "distilbert": {**_COMMON, "dim": 32, "hidden_dim": 48, "n_layers": 3, "n_heads": 4},
    "electra": {**_COMMON, "embedding_size": 16},
    "eurobert": {**_COMMON, **_MARKS, "mask_token_id": 3, "num_key_value_heads": 2},
    "modernbert": {
        **_COMMON,
        **_MARKS,
        "cls_token_id": 1,
        "sep_token_id": 2,
        "local_attention": 8,
        "global_attn_every_n_layers": 2,
    },
    "mpnet": _COMMON,
    "roberta": _COMMON,
    "xlm-roberta": _COMMON,
}
