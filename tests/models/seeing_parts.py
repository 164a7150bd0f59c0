"""What tiny models that read images have alike."""

from typing import Any

from transformers import AutoTokenizer

from models.files.hub import resolve

TEXT: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 1024,
    "eos_token_id": None,
    "bos_token_id": None,
    "pad_token_id": None,
}
VISION: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
}


def tokenizer_with(*added: str) -> Any:
    tokenizer = AutoTokenizer.from_pretrained(resolve("embedded"))
    tokenizer.add_special_tokens({"additional_special_tokens": list(added)})
    tokenizer.chat_template = None
    return tokenizer
