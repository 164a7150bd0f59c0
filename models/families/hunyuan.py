"""Hunyuan, dense and with experts: queries and keys pass their norms behind the rotation."""

from dataclasses import replace
from typing import Any

from core.errors import UnsupportedModel
from kernels.routing import Routing
from models.spec.config_fields import Config, common
from models.spec.model_spec import ModelSpec, MoeSpec

DEFAULTS: dict[str, dict[str, Any]] = {
    "HunYuanDenseV1ForCausalLM": {},
    "HunYuanMoEV1ForCausalLM": {"num_experts": 1, "moe_topk": 1, "num_shared_expert": 1},
}
"""As in `models.families.dense`."""


def hunyuan(config: Config) -> ModelSpec:
    if config.get("use_cla"):
        raise UnsupportedModel("use_cla is not supported: layers would share keys and values")
    if not config.get("use_qk_norm", True):
        raise UnsupportedModel("use_qk_norm false is not supported in this family (only true)")
    spec, bias = common(_with_static_base(config)), bool(config.get("attention_bias", False))
    if spec.rope.kind in ("yarn", "longrope"):
        # They scale queries and keys as they rotate them, and the norm behind that undoes it.
        raise UnsupportedModel(f"rope scaling {spec.rope.kind!r} is not supported in this family")
    return replace(spec, qk_norm="rotated", qkv_bias=bias, out_bias=bias)


def hunyuan_moe(config: Config) -> ModelSpec:
    spec, sizes = hunyuan(config), {key: _alike(config, key) for key in DEFAULTS["HunYuanMoEV1ForCausalLM"]}
    if sizes["num_shared_expert"] != 1:
        raise UnsupportedModel(f"num_shared_expert {sizes['num_shared_expert']} is not supported (only 1)")
    moe = MoeSpec(
        num_experts=sizes["num_experts"],
        intermediate_size=spec.intermediate_size,
        routing=Routing(top_k=sizes["moe_topk"]),
        sparse=(True,) * spec.num_layers,
        router="gate.wg",
        shared_size=spec.intermediate_size,
        shared_name="mlp.shared_mlp",
    )
    return replace(spec, moe=moe)


def _alike(config: Config, key: str) -> int:
    """Return a number that a configuration may say of each layer. Raises UnsupportedModel where layers differ."""
    said = config[key] if isinstance(config[key], list) else [config[key]]
    if len(set(said)) != 1 or not isinstance(said[0], int) or said[0] < 1:
        raise UnsupportedModel(
            f"{key} is {config[key]!r} in config.json; it must be one positive whole number for all layers"
        )
    return said[0]


def _with_static_base(config: Config) -> Config:
    """Return the configuration with what is called dynamic scaling there as it is: an `alpha` by which the base is larger."""
    rope = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    kind, alpha = rope.get("rope_type") or rope.get("type"), rope.get("alpha")
    if kind != "dynamic" or not alpha:
        return config
    dim = common({**config, "rope_parameters": None, "rope_scaling": None}).head_dim
    theta = float(rope.get("rope_theta") or config.get("rope_theta") or 10_000.0)
    return {
        **config,
        "rope_parameters": {"rope_type": "default", "rope_theta": theta * float(alpha) ** (dim / (dim - 2))},
    }
