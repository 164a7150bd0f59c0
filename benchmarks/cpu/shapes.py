"""Random checkpoints of real models' shapes, with a tokenizer, as every peer reads them.

python -m benchmarks.cpu.shapes SHAPE FOLDER"""

import json
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2Config

from models.files.hub import resolve
from tests.models.gguf_files import write_checkpoint


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    family: str
    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    rope_theta: float

    @property
    def layer_numbers(self) -> int:
        """How many numbers the layers' matrices have."""
        attention = self.hidden * self.head_dim * (2 * self.heads + 2 * self.kv_heads)
        return self.layers * (attention + 3 * self.hidden * self.intermediate)

    @property
    def head_numbers(self) -> int:
        return self.hidden * self.vocab


SHAPES = {
    "0.5b": Shape(
        family="qwen2", layers=24, hidden=896, intermediate=4864, heads=14, kv_heads=2, head_dim=64,
        vocab=151_936, rope_theta=1e6,
    ),
    "0.5b-k": Shape(
        family="qwen2", layers=24, hidden=1024, intermediate=4096, heads=16, kv_heads=2, head_dim=64,
        vocab=151_936, rope_theta=1e6,
    ),
    "1b": Shape(
        family="llama", layers=16, hidden=2048, intermediate=8192, heads=32, kv_heads=8, head_dim=64,
        vocab=128_256, rope_theta=5e5,
    ),
    "tiny": Shape(
        family="qwen2", layers=2, hidden=64, intermediate=128, heads=2, kv_heads=2, head_dim=32, vocab=8192, rope_theta=1e6
    ),
}  # fmt: skip
"""Qwen2.5-0.5B's, one as large with sizes of whole K-quants, Llama-3.2-1B's without its stretched positions, one for tests."""
END = 0
"""The embedded model's end of text."""


def make_checkpoint(shape: Shape, folder: Path) -> None:
    """In bfloat16, with tied embeddings, and GGUF beside it. The tokenizer is the embedded model's, filled up with tokens that no
    text has."""
    sizes: dict[str, Any] = {
        "vocab_size": shape.vocab,
        "hidden_size": shape.hidden,
        "intermediate_size": shape.intermediate,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "tie_word_embeddings": True,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_type": "default", "rope_theta": shape.rope_theta},
        "eos_token_id": END,
        "bos_token_id": END,
    }
    config = {"qwen2": Qwen2Config, "llama": LlamaConfig}[shape.family](**sizes)
    torch.manual_seed(0)
    model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder)
    # Peers of other releases of transformers know the older name of the same.
    path = folder / "config.json"
    written = json.loads(path.read_text()) | {"rope_theta": shape.rope_theta, "torch_dtype": "bfloat16"}
    path.write_text(json.dumps(written, indent=1))
    _write_tokenizer(folder, shape.vocab)
    write_checkpoint(folder.with_suffix(".gguf"), folder, "BF16", shape.family)


def _write_tokenizer(folder: Path, size: int) -> None:
    source = resolve("embedded")
    content = json.loads((source / "tokenizer.json").read_text())
    vocabulary = content["model"]["vocab"]
    known = max(*vocabulary.values(), *(token["id"] for token in content["added_tokens"])) + 1
    vocabulary |= {f"<|unused {number}|>": number for number in range(known, size)}
    (folder / "tokenizer.json").write_text(json.dumps(content))
    settings = json.loads((source / "tokenizer_config.json").read_text())
    settings |= {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": 4096}
    settings.pop("extra_special_tokens", None)
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    shutil.copy(source / "chat_template.jinja", folder)


if __name__ == "__main__":
    make_checkpoint(SHAPES[sys.argv[1]], Path(sys.argv[2]))
