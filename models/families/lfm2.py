"""LFM2 and LFM2-MoE: short convolutions between gates, and attention in some layers."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from kernels.routing import Routing
from kernels.states import StateShape
from models.families.hybrid import kinds_of, recurrent
from models.spec.config_fields import Config, common, count
from models.spec.model_spec import LayerNorms, ModelSpec, MoeSpec
from models.spec.recurrent_spec import StateKind

_SHARED: dict[str, Any] = {
    "conv_L_cache": 3,
    "conv_bias": False,
    "max_position_embeddings": 128_000,
    "norm_eps": 1e-5,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "rope_theta": 1_000_000.0,
    "tie_word_embeddings": True,
}
DEFAULTS: dict[str, dict[str, Any]] = {
    "Lfm2ForCausalLM": {
        **_SHARED,
        "block_auto_adjust_ff_dim": True,
        "block_ffn_dim_multiplier": 1.0,
        "block_multiple_of": 256,
    },
    "Lfm2MoeForCausalLM": {
        **_SHARED,
        "moe_intermediate_size": 1792,
        "norm_topk_prob": True,
        "num_dense_layers": 2,
        "num_experts": 32,
        "num_experts_per_tok": 4,
        "routed_scaling_factor": 1.0,
        "use_expert_bias": True,
    },
}
"""As in `models.families.dense`."""

_KINDS: Mapping[str, StateKind] = {"full_attention": "kv", "conv": "short_convolution"}
_PROJECTIONS = ("w1", "w3", "w2")


def lfm2(config: Config) -> ModelSpec:
    config = {**config, "intermediate_size": _inner_size(config)}
    layers = range(count(config, "num_hidden_layers"))
    attends = config.get("full_attn_idxs") or layers
    names = config.get("layer_types") or ["full_attention" if i in attends else "conv" for i in layers]
    return _convolving(config, names)


def lfm2_moe(config: Config) -> ModelSpec:
    spec = _convolving(config, config["layer_types"])
    moe = MoeSpec(
        num_experts=count(config, "num_experts"),
        intermediate_size=count(config, "moe_intermediate_size"),
        routing=Routing(
            top_k=count(config, "num_experts_per_tok"),
            scoring="sigmoid",
            renormalise=bool(config["norm_topk_prob"]),
            scale=float(config["routed_scaling_factor"]),
        ),
        sparse=tuple(layer >= int(config["num_dense_layers"]) for layer in range(spec.num_layers)),
        projections=_PROJECTIONS,
        block_name="feed_forward",
        choice_bias="expert_bias" if config["use_expert_bias"] else "",
    )
    return replace(spec, moe=moe if any(moe.sparse) else None)


def _inner_size(config: Config) -> int:
    """Return the inner size of blocks, of which the configuration may say what it is rounded up from."""
    key = "block_ff_dim" if "block_ff_dim" in config else "intermediate_size"
    size = count(config, key)
    if not config["block_auto_adjust_ff_dim"]:
        return size
    size = int(2 * size / 3)
    if config["block_ffn_dim_multiplier"] is None:
        return size
    unit = count(config, "block_multiple_of")
    return unit * -(-int(config["block_ffn_dim_multiplier"] * size) // unit)


def _convolving(config: Config, names: list[str]) -> ModelSpec:
    """Return the model without experts."""
    tied = config.get("tie_embedding", config["tie_word_embeddings"])
    spec = common({**config, "rms_norm_eps": config["norm_eps"], "tie_word_embeddings": tied})
    heads = spec.num_kv_heads if spec.hidden_size % spec.num_kv_heads == 0 else 1
    shape = StateShape(
        num_key_heads=1,
        num_value_heads=heads,
        key_dim=0,
        value_dim=spec.hidden_size // heads,
        conv_kernel=count(config, "conv_L_cache"),
    )
    kept = recurrent(kinds_of(names, _KINDS, spec.num_layers), shape, spec.num_kv_heads)
    has_bias = bool(config["conv_bias"])
    return replace(
        spec,
        recurrent=kept and replace(kept, conv_bias=has_bias, projection_bias=has_bias),
        qk_norm="head",
        norms=LayerNorms(before_attention="operator_norm", before_mlp="ffn_norm"),
        mlp_name="feed_forward",
        projections=_PROJECTIONS,
    )
