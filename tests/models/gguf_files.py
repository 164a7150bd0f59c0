"""Tiny GGUF files of tiny checkpoints, as llama.cpp's own converter lays them out, with the embedded model's tokens."""

import json
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from transformers import AutoConfig

from models.files.hub import resolve
from tests.models.checkpoints import FAMILIES, make
from tests.models.gguf_converter import write_metadata
from tests.models.gguf_tensors import converted

_SCALES_LAST = {"Q2_K": 4, "Q3_K": 2, "Q6_K": 2}
"""The bytes of scales at the end of a block; others have them first."""
_LARGE = {"Q6_K": 16, "IQ4_XS": 16}
"""By how much smaller their scales are, since their numbers and the scales within a block are larger."""
NUM_TOKENS = 320
"""Bytes and a few merges. `gguf` takes 100 microseconds to read one, and each test reads a file several times."""
TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}"


def write_gguf(
    path: Path,
    family: str,
    kind: str,
    sizes: dict[str, Any] | None = None,
    architecture: str = "",
    num_tokens: int = NUM_TOKENS,
    *,
    others: Mapping[str, str] | None = None,
) -> None:
    """Every matrix becomes `kind`, or what `others` has for its name in the file, which `gguf.quantize` knows or `raw_blocks` makes up."""
    config = FAMILIES[family](random.Random(0), 0)
    config.hidden_size, config.intermediate_size, config.vocab_size = 256, 512, num_tokens
    config.num_attention_heads, config.num_key_value_heads, config.num_hidden_layers = 4, 2, 2
    config.head_dim, config.tie_word_embeddings, config.attention_bias = 64, False, False
    config.mlp_bias = False
    config.rope_parameters = {"rope_type": "default", "rope_theta": 10000.0}
    if getattr(config, "layer_types", None):
        config.layer_types = ["full_attention"] * 2
        config.use_sliding_window = False
    for name, size in (sizes or {}).items():
        setattr(config, name, size)
    folder = path.parent / f"{path.stem}-plain"
    make(folder, config, seed=0)
    write_checkpoint(path, folder, kind, architecture or family, others)


def write_checkpoint(
    path: Path, folder: Path, kind: str, architecture: str, others: Mapping[str, str] | None = None
) -> None:
    """The checkpoint in `folder`, whose matrices become `kind`, or what `others` has for their names in the file."""
    config = AutoConfig.from_pretrained(folder)
    writer = gguf.GGUFWriter(str(path), architecture)
    write_metadata(writer, config, architecture)
    add_tokenizer(writer, tokens(config.vocab_size))
    rng = np.random.default_rng(0)
    for name, numbers in converted(folder, config, architecture).items():
        if numbers.ndim == 1 or not name.endswith(".weight") or numbers.shape[-1] % 32 or kind == "F32":
            writer.add_tensor(name, np.ascontiguousarray(numbers, np.float32))
            continue
        own = (others or {}).get(name, kind)
        type_ = gguf.GGMLQuantizationType[own]
        is_raw = "_K" in own or own.startswith("IQ")
        blocks = raw_blocks(numbers.shape, own, rng) if is_raw else gguf.quantize(numbers, type_)
        writer.add_tensor(name, blocks, raw_dtype=type_)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def raw_blocks(shape: tuple[int, ...], kind: str, rng: np.random.Generator) -> np.ndarray:
    """Any bits at all, with scales of a usual size: `gguf` makes no K- and no I-quants."""
    count, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    blocks = rng.integers(0, 256, (*shape[:-1], shape[-1] // count, size), dtype=np.uint8)
    scales = rng.uniform(1e-4, 2e-4, (*blocks.shape[:-1], 2)) / _LARGE.get(kind, 1)
    scales = scales.astype(np.float16).view(np.uint8)
    if kind in _SCALES_LAST:
        size = _SCALES_LAST[kind]
        blocks[..., -size:] = scales[..., :size]
    else:
        size = 2 if kind.startswith("IQ") else 4
        blocks[..., :size] = scales[..., :size]
    return blocks.reshape(*shape[:-1], -1)


def tokens(size: int) -> list[str]:
    """The embedded model's first tokens, and others behind its last until there are `size`."""
    vocabulary = json.loads((resolve("embedded") / "tokenizer.json").read_text())["model"]["vocab"]
    known = [token for token, _ in sorted(vocabulary.items(), key=lambda item: item[1])]
    return known[:size] + [f"<|unused {number}|>" for number in range(len(known), size)]


def add_tokenizer(writer: gguf.GGUFWriter, vocabulary: list[str]) -> None:
    merges = json.loads((resolve("embedded") / "tokenizer.json").read_text())["model"]["merges"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(vocabulary)
    writer.add_token_types([gguf.TokenType.NORMAL] * len(vocabulary))
    pairs = [merge if isinstance(merge, list) else merge.split(" ") for merge in merges]
    known = set(vocabulary)
    writer.add_token_merges([" ".join(pair) for pair in pairs if "".join(pair) in known])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    writer.add_eot_token_id(2)
    writer.add_chat_template(TEMPLATE)
