"""DeepSeek-V4: attention to a window and to entries that sum up older tokens, several residual streams, experts by token."""

from dataclasses import replace
from typing import Any

from core.errors import UnsupportedModel
from kernels.routing import Routing
from models.spec.compressed_spec import CompressedSpec, EntryIndexSpec, StreamsSpec
from models.spec.config_fields import Config, common, count
from models.spec.model_spec import ModelSpec, MoeSpec, RopeSpec, rope_spec

_KINDS = {"sliding_attention": 0, "compressed_sparse_attention": 4, "heavily_compressed_attention": 128}
"""The tokens that become one entry, by layer type, where a configuration does not say it."""
_BY_RATE = {rate: kind for kind, rate in _KINDS.items()}
DEFAULTS: dict[str, dict[str, Any]] = {
    "DeepseekV4ForCausalLM": {
        "compress_rope_theta": 160000.0,
        "hc_eps": 1e-6,
        "hc_mult": 4,
        "hc_sinkhorn_iters": 20,
        "head_dim": 512,
        "index_head_dim": 128,
        "index_n_heads": 64,
        "index_topk": 512,
        "moe_intermediate_size": 2048,
        "n_routed_experts": 256,
        "n_shared_experts": 1,
        "norm_topk_prob": True,
        "num_experts_per_tok": 6,
        "num_hash_layers": 3,
        "o_groups": 8,
        "o_lora_rank": 1024,
        "q_lora_rank": 1024,
        "qk_rope_head_dim": 64,
        "rope_theta": 10000.0,
        "routed_scaling_factor": 1.5,
        "scoring_func": "sqrtsoftplus",
        "sliding_window": 128,
        "swiglu_limit": 10.0,
    },
}
"""As in `models.families.dense`."""
_ONLY = {"num_key_value_heads": 1, "attention_bias": False, "mlp_bias": False, "norm_topk_prob": True}


def deepseek_v4(config: Config) -> ModelSpec:
    for key, only in _ONLY.items():
        if config.get(key, only) != only:
            raise UnsupportedModel(f"{key} is {config[key]!r} in config.json: only {only!r} is supported")
    plain = {**config, "intermediate_size": config["moe_intermediate_size"], "num_key_value_heads": 1}
    spec = common({**plain, "rope_parameters": None, "rope_scaling": None, "partial_rotary_factor": None})
    kept = _compressed(config, spec)
    within, beyond = _ropes(config, kept.rope_dim)
    return replace(
        spec,
        head_dim=kept.head_dim,
        rope=beyond,
        layer_ropes=tuple(beyond if rate else within for rate in kept.rates),
        activation="limited_silu",
        swiglu=(1.0, float(config["swiglu_limit"])),
        windows=(kept.window,) * spec.num_layers,
        sinks=True,
        compressed=kept,
        streams=StreamsSpec(
            num_streams=count(config, "hc_mult"),
            num_iterations=count(config, "hc_sinkhorn_iters"),
            eps=float(config["hc_eps"]),
        ),
        moe=_experts(config, spec.num_layers),
        skipped_prefixes=("mtp.",),
    )


def _compressed(config: Config, spec: ModelSpec) -> CompressedSpec:
    kinds, head_dim = _layer_types(config, spec.num_layers), count(config, "head_dim")
    kept = CompressedSpec(
        rates=tuple(_rate(config, kind) for kind in kinds),
        chooses=tuple(kind == "compressed_sparse_attention" for kind in kinds),
        index=EntryIndexSpec(
            num_heads=count(config, "index_n_heads"),
            head_dim=count(config, "index_head_dim"),
            top_k=count(config, "index_topk"),
        ),
        window=count(config, "sliding_window"),
        head_dim=head_dim,
        rope_dim=_rope_dim(config, head_dim),
        q_rank=count(config, "q_lora_rank"),
        out_groups=count(config, "o_groups"),
        out_rank=count(config, "o_lora_rank"),
    )
    if spec.num_heads % kept.out_groups:
        raise UnsupportedModel(
            f"{spec.num_heads} attention heads cannot be divided into o_groups {kept.out_groups} groups"
        )
    if kept.rope_dim % 2 or not 0 < kept.rope_dim <= min(head_dim, kept.index.head_dim):
        raise UnsupportedModel(
            f"{kept.rope_dim} dimensions are rotated of heads of {head_dim} and index heads of {kept.index.head_dim}: they must "
            "be an even number of both"
        )
    return kept


def _experts(config: Config, num_layers: int) -> MoeSpec:
    scoring = config["scoring_func"]
    if scoring not in ("sqrtsoftplus", "sigmoid", "softmax"):
        raise UnsupportedModel(
            f"scoring_func {scoring!r} is not supported (sqrtsoftplus, sigmoid and softmax are)"
        )
    kinds = config.get("mlp_layer_types") or [
        "hash_moe" if layer < int(config["num_hash_layers"] or 0) else "moe" for layer in range(num_layers)
    ]
    if len(kinds) != num_layers or set(kinds) - {"hash_moe", "moe"}:
        raise UnsupportedModel(
            f"mlp_layer_types is {kinds!r}: it must be hash_moe or moe for each of {num_layers} layers"
        )
    inner = count(config, "moe_intermediate_size")
    return MoeSpec(
        num_experts=count(config, "n_routed_experts"),
        intermediate_size=inner,
        routing=Routing(
            top_k=count(config, "num_experts_per_tok"),
            scoring=scoring,
            scale=float(config["routed_scaling_factor"]),
        ),
        sparse=(True,) * num_layers,
        projections=("w1", "w3", "w2"),
        choice_bias="gate.e_score_correction_bias",
        by_token=tuple(kind == "hash_moe" for kind in kinds),
        shared_size=inner * int(config["n_shared_experts"] or 0),
    )


def _layer_types(config: Config, num_layers: int) -> list[str]:
    """Return each layer's type: as listed, by its rate in `compress_ratios`, or alternating as DeepSeek-V4-Pro's do."""
    kinds = config.get("layer_types")
    if kinds is None and config.get("compress_ratios") is not None:
        kinds = [_BY_RATE.get(rate, str(rate)) for rate in config["compress_ratios"]][:num_layers]
    if kinds is None:
        kinds = [
            "compressed_sparse_attention" if layer > 1 and layer % 2 else "heavily_compressed_attention"
            for layer in range(num_layers)
        ]
    if len(kinds) != num_layers:
        raise UnsupportedModel(f"layer_types has {len(kinds)} entries for {num_layers} num_hidden_layers")
    if unknown := set(kinds) - set(_KINDS):
        raise UnsupportedModel(f"layer type {min(unknown)!r} is not supported ({', '.join(_KINDS)} are)")
    return list(kinds)


def _rate(config: Config, kind: str) -> int:
    old = {
        "compressed_sparse_attention": "compress_rate_csa",
        "heavily_compressed_attention": "compress_rate_hca",
    }
    said = config.get(old.get(kind, "")) or (config.get("compress_rates") or {}).get(kind)
    rate = _KINDS[kind] if said is None else int(said)
    if rate < 0 or (kind in old and rate < 1):
        raise UnsupportedModel(
            f"{kind} makes one entry of {rate} tokens in config.json: it must be 1 at least"
        )
    return rate


def _rope_dim(config: Config, head_dim: int) -> int:
    said = config.get("partial_rotary_factor")
    return count(config, "qk_rope_head_dim") if said is None else int(head_dim * float(said))


def _ropes(config: Config, rope_dim: int) -> tuple[RopeSpec, RopeSpec]:
    """Return the rotation of layers without entries, and of those with some. YaRN's magnitude is left out."""
    given = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if isinstance(given.get("main"), dict) and isinstance(given.get("compress"), dict):
        main, compress = given["main"], given["compress"]
    else:
        main, compress = (
            {"rope_theta": config["rope_theta"]},
            {**given, "rope_theta": config["compress_rope_theta"]},
        )
    found: list[RopeSpec] = []
    for said in (main, compress):
        whole = {key: value for key, value in said.items() if key != "partial_rotary_factor"}
        if "yarn" in (whole.get("rope_type"), whole.get("type")):
            whole.setdefault("attention_factor", 1.0)
        plain = {**config, "rope_parameters": whole, "partial_rotary_factor": None}
        found.append(replace(rope_spec(plain), head_dim=rope_dim))
    return found[0], found[1]
