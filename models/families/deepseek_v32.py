"""DeepSeek-V3.2 and GLM-5: latent attention in which each query chooses the tokens that it attends to."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from core.errors import UnsupportedModel
from models.families.deepseek import DEFAULTS as DEEPSEEK
from models.families.deepseek import deepseek_v3
from models.spec.config_fields import Config, count
from models.spec.latent_spec import TokenIndexSpec
from models.spec.model_spec import ModelSpec

_INDEX: dict[str, Any] = {"index_head_dim": 128, "index_topk": 2048}
DEFAULTS: dict[str, dict[str, Any]] = {
    "DeepseekV32ForCausalLM": {
        **DEEPSEEK["DeepseekV3ForCausalLM"],
        **_INDEX,
        "index_n_heads": 64,
        "indexer_rope_interleave": False,
    },
    "GlmMoeDsaForCausalLM": {
        **DEEPSEEK["DeepseekV3ForCausalLM"],
        **_INDEX,
        "index_n_heads": 32,
        "indexer_rope_interleave": True,
        "n_group": 1,
        "q_lora_rank": 2048,
        "qk_nope_head_dim": 192,
        "topk_group": 1,
        "v_head_dim": 256,
    },
}
"""As in `models.families.dense`."""
_KINDS = {"F": True, "full": True, "S": False, "shared": False}
"""Whether a layer chooses tokens itself, by what configurations call it."""


def deepseek_v32(config: Config) -> ModelSpec:
    return _indexed(config, (True,) * count(config, "num_hidden_layers"))


def glm_moe_dsa(config: Config) -> ModelSpec:
    chooses = choosing_layers(config)
    if len(chooses) != (num_layers := count(config, "num_hidden_layers")):
        raise UnsupportedModel(f"indexer_types has {len(chooses)} entries for {num_layers} num_hidden_layers")
    if not chooses[0]:
        raise UnsupportedModel(
            "indexer_types begins with 'shared' in config.json: the first layer has no earlier one whose tokens it could share"
        )
    return _indexed(config, chooses)


def choosing_layers(config: Config) -> tuple[bool, ...]:
    """Return which layers choose tokens themselves: by a list or a pattern of letters, or every so many layers."""
    said: Sequence[str] | None = config.get("indexer_types") or config.get("index_topk_pattern")
    if said is None:
        every = max(1, int(config.get("index_topk_freq") or 1))
        given = config.get("index_skip_topk_offset")
        offset = 2 if given is None else int(given)
        num_layers = count(config, "num_hidden_layers")
        return tuple(max(layer - offset + 1, 0) % every == 0 for layer in range(num_layers))
    if unknown := set(said) - set(_KINDS):
        raise UnsupportedModel(
            f"indexer type {min(unknown)!r} is not supported in config.json (full and shared are)"
        )
    return tuple(_KINDS[kind] for kind in said)


def _indexed(config: Config, chooses: tuple[bool, ...]) -> ModelSpec:
    if config["q_lora_rank"] is None:
        raise UnsupportedModel(
            "q_lora_rank is null in config.json: index queries are made from queries' latents, which such a model does not have"
        )
    # Attention rotates neighbours in all of these models, whatever a configuration says.
    spec = deepseek_v3({**config, "rope_interleave": True})
    index = TokenIndexSpec(
        num_heads=count(config, "index_n_heads"),
        head_dim=count(config, "index_head_dim"),
        top_k=count(config, "index_topk"),
        interleaved=bool(config["indexer_rope_interleave"]),
        chooses=chooses,
    )
    assert spec.mla is not None
    if index.head_dim < spec.mla.rope_dim:
        raise UnsupportedModel(
            f"index_head_dim is {index.head_dim} in config.json, less than the {spec.mla.rope_dim} of qk_rope_head_dim that are "
            "rotated of it"
        )
    return replace(spec, mla=replace(spec.mla, index=index))
