"""Tiny GGUF files of tiny checkpoints, as llama.cpp's own converter lays them out, with the embedded model's tokens."""

import json
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from safetensors.torch import load_file
from transformers import AutoConfig

from models.files.hub import resolve
from tests.models.checkpoints import FAMILIES, make

_LAYER = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_ENDS = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
_SCALES_LAST = {"Q2_K": 4, "Q3_K": 2, "Q6_K": 2}
"""The bytes of scales at the end of a block; others have them first."""
_LARGE = {"Q6_K": 16, "IQ4_XS": 16}
"""By how much smaller their scales are, since their numbers and the scales within a block are larger."""
NUM_TOKENS = 320
"""Bytes and a few merges. `gguf` takes 100 microseconds to read one, and each test reads a file several times."""
TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}"


def gguf_name(name: str) -> str:
    stem, _, what = name.rpartition(".")
    if stem in _ENDS:
        return f"{_ENDS[stem]}.{what}"
    _, _, layer, part = stem.split(".", 3)
    return f"blk.{layer}.{_LAYER[part]}.{what}"


def by_pairs(rows: torch.Tensor, heads: int) -> torch.Tensor:
    """llama.cpp's `LlamaModel.permute`."""
    return rows.reshape(heads, 2, -1, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)


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
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    rope = config.rope_parameters
    writer.add_rope_freq_base(rope["rope_theta"])
    if rope["rope_type"] != "default":
        writer.add_rope_scaling_type(gguf.RopeScalingType(rope["rope_type"]))
        writer.add_rope_scaling_factor(rope["factor"])
    if original := rope.get("original_max_position_embeddings"):
        writer.add_rope_scaling_orig_ctx_len(original)
    add_tokenizer(writer, tokens(config.vocab_size))
    rng = np.random.default_rng(0)
    for name, tensor in load_file(folder / "model.safetensors").items():
        if architecture == "llama" and ".q_proj." in name:
            tensor = by_pairs(tensor, config.num_attention_heads)
        if architecture == "llama" and ".k_proj." in name:
            tensor = by_pairs(tensor, config.num_key_value_heads)
        numbers = tensor.float().numpy()
        if numbers.ndim == 1:
            writer.add_tensor(gguf_name(name), numbers)
            continue
        own = (others or {}).get(gguf_name(name), kind)
        type_ = gguf.GGMLQuantizationType[own]
        is_raw = "_K" in own or own.startswith("IQ")
        blocks = raw_blocks(numbers.shape, own, rng) if is_raw else gguf.quantize(numbers, type_)
        writer.add_tensor(gguf_name(name), blocks, raw_dtype=type_)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def raw_blocks(shape: tuple[int, ...], kind: str, rng: np.random.Generator) -> np.ndarray:
    """Any bits at all, with scales of a usual size: `gguf` makes no K- and no I-quants."""
    count, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    blocks = rng.integers(0, 256, (shape[0], shape[1] // count, size), dtype=np.uint8)
    scales = rng.uniform(1e-4, 2e-4, (*blocks.shape[:2], 2)) / _LARGE.get(kind, 1)
    scales = scales.astype(np.float16).view(np.uint8)
    if kind in _SCALES_LAST:
        size = _SCALES_LAST[kind]
        blocks[..., -size:] = scales[..., :size]
    else:
        size = 2 if kind.startswith("IQ") else 4
        blocks[..., :size] = scales[..., :size]
    return blocks.reshape(shape[0], -1)


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
