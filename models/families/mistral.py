"""Mistral's models of which queries grow with their position: Ministral 3, and Mistral 4 with a latent KV cache and experts."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from core.errors import UnsupportedModel
from kernels.routing import Routing
from models.families.deepseek import latent
from models.spec.config_fields import Config, common, count, windows
from models.spec.model_spec import ModelSpec, QueryTemperature, RopeSpec

_YARN: Mapping[str, Any] = {
    "rope_type": "yarn",
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.1,
}
DEFAULTS: dict[str, dict[str, Any]] = {
    "Ministral3ForCausalLM": {
        "head_dim": 128,
        "num_key_value_heads": 8,
    },
    "Mistral4ForCausalLM": {
        "attention_bias": False,
        "first_k_dense_replace": 0,
        "kv_lora_rank": 256,
        "moe_intermediate_size": 2048,
        "n_group": 1,
        "n_routed_experts": 128,
        "n_shared_experts": 1,
        "norm_topk_prob": True,
        "num_experts_per_tok": 4,
        "q_lora_rank": 1024,
        "qk_nope_head_dim": 64,
        "qk_rope_head_dim": 64,
        "rope_interleave": True,
        "routed_scaling_factor": 1.0,
        "topk_group": 1,
        "v_head_dim": 128,
    },
}
"""As in `models.families.dense`."""


def ministral3(config: Config) -> ModelSpec:
    silent = {**_YARN, "rope_theta": 1e6, "factor": 16.0, "original_max_position_embeddings": 16_384}
    spec = common({**config, "rope_parameters": _rope(config, silent)})
    return replace(
        spec,
        windows=windows(config, lambda _: bool(config.get("sliding_window"))),
        query_temperature=_temperature(spec.rope),
    )


def mistral4(config: Config) -> ModelSpec:
    routing = Routing(
        top_k=count(config, "num_experts_per_tok"),
        renormalise=bool(config["norm_topk_prob"]),
        scale=float(config["routed_scaling_factor"]),
        num_groups=count(config, "n_group"),
        top_groups=count(config, "topk_group"),
        group_best=2,
    )
    silent = {**_YARN, "rope_theta": 1e4, "factor": 128.0, "original_max_position_embeddings": 8192}
    rope = _rope(config, silent)
    # That share of a head follows from other sizes.
    _check_share(config, rope.pop("partial_rotary_factor", None))
    spec = latent({**config, "rope_parameters": rope}, routing, interleaved=bool(config["rope_interleave"]))
    return replace(spec, query_temperature=_temperature(spec.rope))


def _rope(config: Config, silent: Mapping[str, Any]) -> dict[str, Any]:
    """`silent` is what is meant where the configuration does not say it."""
    return dict(config.get("rope_parameters") or config.get("rope_scaling") or silent)


def _check_share(config: Config, share: float | None) -> None:
    rotated = count(config, "qk_rope_head_dim")
    whole = rotated + count(config, "qk_nope_head_dim")
    if share is not None and int(whole * float(share)) != rotated:
        raise UnsupportedModel(
            f"partial_rotary_factor {share} is not supported: by qk_rope_head_dim {rotated} of {whole} dimensions are rotated"
        )


def _temperature(rope: RopeSpec) -> QueryTemperature | None:
    scale = float(rope.parameters.get("llama_4_scaling_beta") or 0.0)
    if not scale:
        return None
    first = float(rope.parameters["original_max_position_embeddings"])
    return QueryTemperature(floor_tokens=first, scale=scale, counts_itself=False, everywhere=True)
