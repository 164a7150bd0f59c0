"""Llama 4: attention within chunks, layers without positions, and experts whose input is weighed."""

from dataclasses import replace
from typing import Any

from core.errors import UnsupportedModel
from kernels.routing import Routing
from models.spec.config_fields import Config, common, count, ropes_where, rotating_layers, text_part
from models.spec.model_spec import ModelSpec, MoeSpec, QueryTemperature

DEFAULTS: dict[str, dict[str, Any]] = {
    "Llama4ForCausalLM": {
        "vocab_size": 202_048,
        "hidden_size": 5120,
        "intermediate_size": 8192,
        "intermediate_size_mlp": 16_384,
        "num_hidden_layers": 48,
        "num_attention_heads": 40,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 131_072,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500_000.0,
        "num_experts_per_tok": 1,
        "num_local_experts": 16,
        "interleave_moe_layer_step": 1,
        "use_qk_norm": True,
        "no_rope_layer_interval": 4,
        "attention_chunk_size": 8192,
        "attn_temperature_tuning": True,
        "floor_scale": 8192,
        "attn_scale": 0.1,
    },
    "Llama4ForConditionalGeneration": {},
}
"""As in `models.families.dense`."""
_KINDS = {"full_attention", "chunked_attention"}


def llama4(config: Config) -> ModelSpec:
    spec, bias = common(config), bool(config.get("attention_bias", False))
    rotates = rotating_layers(config)
    chunk = int(config["attention_chunk_size"] or 0)
    moe = _experts(config, spec.num_layers)
    if config["use_qk_norm"] and spec.rope.kind in ("yarn", "longrope"):
        # They scale queries and keys as they rotate them, and the norm behind that undoes it.
        raise UnsupportedModel(f"rope scaling {spec.rope.kind!r} is not supported with use_qk_norm")
    return replace(
        spec,
        intermediate_size=count(config, "intermediate_size_mlp"),
        layer_ropes=ropes_where(spec.rope, rotates),
        rotates_neighbours=True,
        chunks=tuple(chunk if chunked else 0 for chunked in _chunked_layers(config, rotates)),
        query_temperature=_temperature(config),
        qkv_bias=bias,
        out_bias=bias,
        qk_norm="unit" if config["use_qk_norm"] else "none",
        mlp_name="feed_forward",
        moe=moe if any(moe.sparse) else None,
    )


def llama4_of_texts(config: Config) -> ModelSpec:
    """Return the decoder of a model that also sees: for text alone."""
    return text_part(config, llama4, DEFAULTS["Llama4ForCausalLM"], "vision_model.")


def _chunked_layers(config: Config, rotates: tuple[bool, ...]) -> tuple[bool, ...]:
    kinds = config.get("layer_types")
    if not kinds:
        return rotates
    if unknown := set(kinds) - _KINDS:
        raise UnsupportedModel(
            f"layer type {sorted(unknown)[0]!r} is not supported in this family (full_attention and chunked_attention are)"
        )
    if len(kinds) != len(rotates):
        raise UnsupportedModel(f"layer_types has {len(kinds)} entries for {len(rotates)} num_hidden_layers")
    return tuple(kind == "chunked_attention" for kind in kinds)


def _temperature(config: Config) -> QueryTemperature | None:
    if not config["attn_temperature_tuning"]:
        return None
    return QueryTemperature(floor_tokens=float(config["floor_scale"]), scale=float(config["attn_scale"]))


def _experts(config: Config, num_layers: int) -> MoeSpec:
    # A token's weight is multiplied into its input, so that several experts would each need an input of their own.
    if (top_k := count(config, "num_experts_per_tok")) != 1:
        raise UnsupportedModel(
            f"num_experts_per_tok is {top_k}, which is not supported in this family (1 is)"
        )
    step, given = count(config, "interleave_moe_layer_step"), config.get("moe_layers")
    sparse = set(range(step - 1, num_layers, step)) if given is None else {int(layer) for layer in given}
    inner = count(config, "intermediate_size")
    return MoeSpec(
        num_experts=count(config, "num_local_experts"),
        intermediate_size=inner,
        routing=Routing(top_k=1, scoring="sigmoid", renormalise=False),
        sparse=tuple(layer in sparse for layer in range(num_layers)),
        weighs_inputs=True,
        transposed=True,
        block_name="feed_forward",
        router="router",
        shared_size=inner,
        shared_name="feed_forward.shared_expert",
    )
