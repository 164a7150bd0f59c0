"""Gemma 4, for text: dense (12B, 31B), with experts beside the dense block (26B-A4B), and with inputs of each layer's own and
keys and values that later layers read, too (E2B, E4B)."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from core.errors import UnsupportedModel
from kernels.routing import Routing
from models.families.dense import SANDWICH
from models.spec.config_fields import LAYER_TYPES, Config, common, count, text_part
from models.spec.kv_spec import KVSpec, LayerHeads
from models.spec.model_spec import LayerInputsSpec, ModelSpec, MoeSpec, RopeSpec, rope_spec

_TEXT: dict[str, Any] = {
    "vocab_size": 262_144,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 30,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "global_head_dim": 512,
    "max_position_embeddings": 131_072,
    "rms_norm_eps": 1e-6,
    "sliding_window": 512,
    "hidden_activation": "gelu_pytorch_tanh",
    "tie_word_embeddings": True,
    "hidden_size_per_layer_input": 256,
    "vocab_size_per_layer_input": 262_144,
}
_ROPES: Mapping[str, Any] = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
    "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6},
}
_UNIFIED: dict[str, Any] = {
    **_TEXT,
    "max_position_embeddings": 262_144,
    "sliding_window": 1024,
    "hidden_size_per_layer_input": 0,
}
DEFAULTS: dict[str, dict[str, Any]] = {
    "Gemma4ForCausalLM": _TEXT,
    "Gemma4ForConditionalGeneration": {},
    "Gemma4UnifiedForCausalLM": _UNIFIED,
    "Gemma4UnifiedForConditionalGeneration": {},
}
"""As in `models.families.dense`."""
_OTHERS = ("vision_tower.", "audio_tower.", "vision_embedder.", "embed_vision.", "embed_audio.")
"""Beginnings of the names of what sees and hears."""
_EVERY = 6
"""Without layer_types, each layer of this number attends to everything."""


def gemma4(config: Config) -> ModelSpec:
    if config.get("use_bidirectional_attention") == "all":
        raise UnsupportedModel(
            "use_bidirectional_attention is 'all', which is not supported: a token may only see earlier ones"
        )
    kinds = _kinds(config)
    heads = _heads(config, kinds)
    ropes = {kind: _rope(config, kind, heads[kinds.index(kind)].head_dim) for kind in set(kinds)}
    window, first = count(config, "sliding_window"), heads[0]
    plain = {**config, "rope_parameters": None, "rope_scaling": None}
    spec = common(
        {**plain, "num_key_value_heads": first.num_kv_heads, "head_dim": first.head_dim}, "hidden_activation"
    )
    bias = bool(config.get("attention_bias", False))
    spec = replace(
        spec,
        rope=ropes[kinds[0]],
        layer_ropes=tuple(ropes[kind] for kind in kinds),
        windows=tuple(window if kind == "sliding_attention" else 0 for kind in kinds),
        kv=_kv(config, kinds, heads),
        qk_norm="head",
        query_scale=1.0,
        qkv_bias=bias,
        out_bias=bias,
        norms=SANDWICH,
        layer_scalars=True,
        embedding_scale=spec.hidden_size**0.5,
        logit_soft_cap=float(config.get("final_logit_softcapping") or 0.0),
    )
    return replace(spec, **_layer_inputs(config), **_mlps(config, spec))


def gemma4_of_texts(config: Config) -> ModelSpec:
    return text_part(config, gemma4, _TEXT, *_OTHERS)


def unified_of_texts(config: Config) -> ModelSpec:
    return text_part(config, gemma4, _UNIFIED, *_OTHERS)


def _kinds(config: Config) -> tuple[str, ...]:
    num_layers = count(config, "num_hidden_layers")
    given = config.get("layer_types") or [
        "sliding_attention" if (layer + 1) % _EVERY else "full_attention" for layer in range(num_layers)
    ]
    if unknown := set(given) - LAYER_TYPES:
        raise UnsupportedModel(
            f"layer type {sorted(unknown)[0]!r} is not supported (full_attention and sliding_attention are)"
        )
    if len(given) != num_layers:
        raise UnsupportedModel(f"layer_types has {len(given)} entries for {num_layers} num_hidden_layers")
    return (*given[:-1], "full_attention")  # transformers makes the last layer one, whatever is said


def _heads(config: Config, kinds: tuple[str, ...]) -> tuple[LayerHeads, ...]:
    """Return each layer's heads: by `per_layer_config` (transformers 5), or by what the config says of all full layers."""
    given, per_layer = count(config, "num_key_value_heads"), config.get("per_layer_config")
    within = LayerHeads(num_kv_heads=given, head_dim=count(config, "head_dim"))
    if per_layer is not None:
        own_of = {int(layer): own for layer, own in per_layer.items()}  # "05" where there are ten and more
        if unknown := {name for own in own_of.values() for name in own} - {"num_key_value_heads", "head_dim"}:
            raise UnsupportedModel(
                f"per_layer_config says {sorted(unknown)[0]!r}, which is not supported (num_key_value_heads and head_dim are)"
            )
        each = [{**config, **own_of.get(layer, {})} for layer in range(len(kinds))]
        return tuple(
            LayerHeads(num_kv_heads=count(own, "num_key_value_heads"), head_dim=count(own, "head_dim"))
            for own in each
        )
    wide = config.get("num_global_key_value_heads") if config.get("attention_k_eq_v") else None
    full = LayerHeads(num_kv_heads=wide or given, head_dim=count(config, "global_head_dim"))
    return tuple(within if kind == "sliding_attention" else full for kind in kinds)


def _rope(config: Config, kind: str, head_dim: int) -> RopeSpec:
    given = dict((config.get("rope_parameters") or _ROPES).get(kind) or _ROPES[kind])
    if given.get("rope_type") != "proportional":
        plain = {**config, "rope_scaling": None, "rope_parameters": given}
        return replace(rope_spec(plain), head_dim=head_dim)
    share, factor = float(given.get("partial_rotary_factor", 1.0)), float(given.get("factor", 1.0))
    if not 0 < share <= 1 or factor <= 0:
        raise UnsupportedModel(
            f"rope_parameters of {kind} say partial_rotary_factor {share} and factor {factor}; the one must be over 0 and at "
            "most 1, the other over 0"
        )
    parameters = {"partial_rotary_factor": share, "factor": factor}
    return RopeSpec("proportional", float(given["rope_theta"]), parameters, head_dim=head_dim)


def _kv(config: Config, kinds: tuple[str, ...], heads: tuple[LayerHeads, ...]) -> KVSpec:
    num_layers, shared = len(kinds), int(config.get("num_kv_shared_layers") or 0)
    sources = list(range(num_layers))
    for layer in range(num_layers - shared, num_layers):
        earlier = [at for at in range(num_layers - shared) if kinds[at] == kinds[layer]]
        if not earlier or heads[earlier[-1]] != heads[layer]:
            raise UnsupportedModel(
                f"num_kv_shared_layers is {shared}, but no earlier layer has keys and values for layer {layer}"
            )
        sources[layer] = earlier[-1]
    alike = bool(config.get("attention_k_eq_v"))
    found = KVSpec(
        heads=heads,
        sources=tuple(sources),
        keys_are_values=tuple(alike and kind == "full_attention" for kind in kinds),
    )
    num_heads = count(config, "num_attention_heads")
    for own in set(heads):
        if num_heads % own.num_kv_heads or own.head_dim % 2:
            raise UnsupportedModel(
                f"{num_heads} attention heads over {own.num_kv_heads} KV heads of {own.head_dim} are not supported: the first "
                "must be a multiple of the second, and the third even"
            )
    if found.misfit:
        raise UnsupportedModel(found.misfit)
    return found


def _layer_inputs(config: Config) -> dict[str, Any]:
    size = int(config.get("hidden_size_per_layer_input") or 0)
    if not size:
        return {}
    vocab_size = count(config, "vocab_size_per_layer_input")
    if vocab_size < count(config, "vocab_size"):
        raise UnsupportedModel(
            f"vocab_size_per_layer_input is {vocab_size} in config.json, less than vocab_size {config['vocab_size']}"
        )
    return {"layer_inputs": LayerInputsSpec(size=size, vocab_size=vocab_size)}


def _mlps(config: Config, spec: ModelSpec) -> dict[str, Any]:
    """Return what the feed-forward blocks are. Those with experts make their own norms before them."""
    num_layers, shared = spec.num_layers, int(config.get("num_kv_shared_layers") or 0)
    found: dict[str, Any] = {}
    if config.get("use_double_wide_mlp") and shared:
        inner = spec.intermediate_size
        found["mlp_sizes"] = (inner,) * (num_layers - shared) + (2 * inner,) * shared
    if not config.get("enable_moe_block"):
        return found
    if "mlp_sizes" in found:
        raise UnsupportedModel("use_double_wide_mlp is not supported with enable_moe_block")
    moe = MoeSpec(
        num_experts=count(config, "num_experts"),
        intermediate_size=count(config, "moe_intermediate_size"),
        routing=Routing(top_k=count(config, "top_k_experts")),
        sparse=(True,) * num_layers,
        beside_dense=True,
    )
    return {"moe": moe, "norms": replace(SANDWICH, before_mlp="")}
