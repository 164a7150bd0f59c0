"""A model of the catalogue from any `config.json`: what its weights weigh, how many of them a token uses, what it keeps.

The counts follow from the sizes that the configuration names (transformers' keys): grouped-query or latent attention (MLA), also
to tokens that each query chooses (`sim.catalogue.token_index`), or to entries (`sim.catalogue.entry_layers`), dense or routed
experts (MoE) with shared ones, recurrent layers, and quantised weights; embeddings and the last projection stay in 16 bits.
Recurrent layers keep a state that does not grow; those with a sliding window are counted as though they kept everything."""

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from core.errors import ConfigError
from models.spec.expert_share import EXPERT_KEYS, expert_share, said
from sim.catalogue.catalogue import MODELS, CatalogueModel
from sim.catalogue.entry_layers import has_entries, with_entries
from sim.catalogue.layer_counts import LayerCounts, half_layers
from sim.catalogue.recurrent_layers import RecurrentLayer, recurrent_layer
from sim.catalogue.sized_layers import sized_layers
from sim.catalogue.token_index import with_token_index

_BYTES = {"float32": 4.0, "float16": 2.0, "bfloat16": 2.0}
_QUANTISED_BYTES = {"fp8": 1.0, "fbgemm_fp8": 1.0, "mxfp4": 0.53, "bitnet": 0.25}
_SCALES = 0.02
"""Bytes of scales for each 4- or 8-bit weight: 16 bits for 128 weights, and zeros."""
_FP4_BYTES = 0.5 + 1 / 16
"""Bytes of a weight of ModelOpt's four bits, with one for each 16."""
_SHARED_KEYS = ("n_shared_experts", "moe_num_shared_experts", "num_shared_expert", "num_shared_experts")
_SHARED_SIZES = (
    "shared_expert_intermediate_size",
    "shared_intermediate_size",
    "moe_shared_expert_intermediate_size",
)
_NO_GATE = {
    "gpt2",
    "gpt_neo",
    "gptj",
    "gpt_neox",
    "opt",
    "bloom",
    "phi",
    "falcon",
    "starcoder2",
    "nemotron_h",
}
"""Model types whose feed-forward layers have two matrices in place of three."""

_GATED = ("qwen3_next", "qwen3_5")
"""Beginnings of model types whose attention has gates, of as many weights as its queries."""


def named_model(name: str, adapter_bytes: float = 0.0) -> CatalogueModel:
    """Return the catalogue's model of that name, or that of a `config.json` at that path, with adapters of so many bytes. Raises
    ConfigError."""
    if name not in MODELS and not Path(name).exists():
        raise ConfigError(
            f"no model {name}: it is neither one of {', '.join(MODELS)} nor a config.json or its folder"
        )
    found = MODELS[name] if name in MODELS else read_model(Path(name))
    return replace(found, adapter_bytes=adapter_bytes)


def read_model(path: Path) -> CatalogueModel:
    """Read a `config.json`, or that of a folder. Raises ConfigError where it names no sizes."""
    file = path / "config.json" if path.is_dir() else path
    try:
        config = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"{file} cannot be read as a model's config.json: {error}") from None
    if not isinstance(config, dict):
        raise ConfigError(f"{file} is no model's config.json: it holds no object")
    try:
        return model_of(config)
    except (KeyError, TypeError) as error:
        raise ConfigError(
            f"{file} does not say what a model's size follows from: {error} is missing"
        ) from None


def model_of(config: Mapping[str, Any]) -> CatalogueModel:
    """Return the model. Raises KeyError for a size that is not there."""
    text = config.get("text_config") or config.get("llm_config") or config
    whole = {**config, **text}
    counts = half_layers(whole) or _counts(whole, whole["num_hidden_layers"])
    hidden, heads = whole["hidden_size"], whole["num_attention_heads"]
    attention, kv_values, pair_values = _attention(whole, hidden, heads)
    recurrent = recurrent_layer(whole, hidden) if counts.recurrent else RecurrentLayer(0, 0)
    gate = 2 if whole.get("model_type") in _NO_GATE else 3
    dense = gate * hidden * _dense_size(whole, hidden)
    num_experts, expert, shared = _experts(whole, hidden, gate)
    growing, num_moe = counts.growing, counts.sparse
    layers = growing * attention + counts.recurrent * recurrent.num_weights + counts.dense * dense
    layers += num_moe * (shared + hidden * num_experts)
    kv_token_values, all_pairs, sized = growing * kv_values, growing * pair_values, sized_layers(whole)
    if sized is not None:
        layers = sized.num_weights + num_moe * hidden * num_experts
        kv_token_values, all_pairs = sized.kv_values, sized.pair_values
    embeddings = whole["vocab_size"] * hidden * (1 if whole.get("tie_word_embeddings") else 2)
    embeddings += 0 if sized is None else sized.table_weights
    value_bytes = _value_bytes(config, whole)
    plain_bytes = _BYTES.get(str(whole.get("dtype") or whole.get("torch_dtype") or "bfloat16"), 2.0)
    model = CatalogueModel(
        num_weights=layers + embeddings,
        num_layers=counts.layers,
        num_heads=heads,
        num_kv_heads=whole.get("num_key_value_heads") or heads,
        head_dim=whole.get("head_dim") or hidden // heads,
        hidden_size=hidden,
        weight_bytes=layers * value_bytes + embeddings * plain_bytes,
        num_expert_weights=num_moe * num_experts * expert,
        expert_weight_bytes=num_moe * num_experts * expert * value_bytes,
        expert_share=expert_share(whole.get),
        kv_token_values=kv_token_values,
        pair_values=all_pairs,
        state_bytes=counts.recurrent * recurrent.state_bytes,
    )
    return with_entries(with_token_index(model, whole, value_bytes), whole, value_bytes)


def _attention(config: Mapping[str, Any], hidden: int, heads: int) -> tuple[int, int, int]:
    """Return (weights, values kept for a token, products of a query with one key and value) of a layer; nothing of layers with
    entries, which `sim.catalogue.entry_layers` adds."""
    if has_entries(config):
        return 0, 0, 0
    if rank := config.get("kv_lora_rank"):
        rope, nope, value = config["qk_rope_head_dim"], config["qk_nope_head_dim"], config["v_head_dim"]
        query = config.get("q_lora_rank")
        query_weights = query * (hidden + heads * (nope + rope)) if query else hidden * heads * (nope + rope)
        weights = (
            query_weights + hidden * (rank + rope) + rank * heads * (nope + value) + heads * value * hidden
        )
        return weights, rank + rope, heads * (nope + rope + value)
    size = config.get("head_dim") or hidden // heads
    kv_heads = config.get("num_key_value_heads") or heads
    weights = 2 * hidden * size * (heads + kv_heads)
    if config.get("attn_output_gate", str(config.get("model_type")).startswith(_GATED)):
        weights += hidden * size * heads
    return weights, 2 * kv_heads * size, 2 * heads * size


def _dense_size(config: Mapping[str, Any], hidden: int) -> int:
    keys = ("intermediate_size_mlp", "shared_intermediate_size", "intermediate_size", "ffn_dim", "n_inner")
    return next((config[key] for key in keys if config.get(key)), 4 * hidden)


def _experts(config: Mapping[str, Any], hidden: int, gate: int) -> tuple[int, int, int]:
    """Return (experts of a layer, weights of one, weights of those that every token uses)."""
    num = said(config.get, EXPERT_KEYS)
    size = config.get("moe_intermediate_size") or config.get("intermediate_size") or 0
    shared = next((config[key] for key in _SHARED_SIZES if config.get(key)), 0)
    shared = shared or size * (said(config.get, _SHARED_KEYS) or config.get("model_type") == "hunyuan_v1_moe")
    latent = config.get("moe_latent_size") or 0
    return num, gate * (latent or hidden) * size, hidden * (gate * shared + 2 * latent)


def _is_moe(config: Mapping[str, Any], layer: int) -> bool:
    if not said(config.get, EXPERT_KEYS):
        return False
    if kinds := config.get("mlp_layer_types"):
        return kinds[layer] in ("sparse", "moe", "hash_moe")
    last = config.get("moe_layer_end_index", -1)
    if layer < config.get("moe_layer_start_index", 0) or -1 < last < layer:
        return False
    if layer < (config.get("first_k_dense_replace") or 0) or layer in (config.get("mlp_only_layers") or ()):
        return False
    step = config.get("decoder_sparse_step") or config.get("moe_layer_freq") or 1
    step = config.get("interleave_moe_layer_step") or config.get("moe_layer_interval") or step
    return (layer + 1) % step == 0 if isinstance(step, int) else bool(step[layer])


def _counts(config: Mapping[str, Any], num_layers: int) -> LayerCounts:
    growing = _num_growing(config, num_layers)
    sparse = sum(_is_moe(config, layer) for layer in range(num_layers))
    return LayerCounts(
        layers=num_layers,
        growing=growing,
        recurrent=num_layers - growing,
        dense=num_layers - sparse,
        sparse=sparse,
    )


def _num_growing(config: Mapping[str, Any], num_layers: int) -> int:
    """Return the number of layers whose state grows with the context."""
    kinds = config.get("layer_types")
    if kinds:
        return sum("linear" not in kind and "mamba" not in kind for kind in kinds)
    if attending := (config.get("linear_attn_config") or {}).get("full_attn_layers"):
        return len(attending)
    interval = config.get("full_attention_interval")
    return num_layers // interval if interval else num_layers


def _value_bytes(config: Mapping[str, Any], text: Mapping[str, Any]) -> float:
    """Return the bytes of one weight of a layer. Raises ConfigError for a quantisation whose bits are not said."""
    found = config.get("quantization_config") or text.get("quantization_config") or {}
    plain = _BYTES.get(str(text.get("dtype") or text.get("torch_dtype") or "bfloat16"), 2.0)
    if not found:
        return plain
    method = found.get("quant_method", "")
    if method in _QUANTISED_BYTES:
        return _QUANTISED_BYTES[method]
    if algorithms := _algorithms(found):
        return max(_FP4_BYTES if "FP4" in name or "W4" in name else 1 + _SCALES for name in algorithms)
    if method == "bitsandbytes":
        return 0.5 + _SCALES if found.get("load_in_4bit") else 1 + _SCALES
    groups = (found.get("config_groups") or {}).values()
    bits = [group["weights"]["num_bits"] for group in groups if group.get("weights")] or [found.get("bits")]
    if not bits[0]:
        raise ConfigError(f"the model's quantization_config does not say how many bits {method or 'it'} has")
    return max(bits) / 8 + _SCALES


def _algorithms(found: Mapping[str, Any]) -> list[str]:
    """Return ModelOpt's names of how weights are stored."""
    layers = [found, *(found.get("quantized_layers") or {}).values()]
    return [
        str(layer["quant_algo"])
        for layer in layers
        if layer.get("quant_algo") not in (None, "MIXED_PRECISION")
    ]
