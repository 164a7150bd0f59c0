"""Reads a folder's config.json into a ModelSpec. What a model asks for and Baton cannot do is refused here, by name."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from core.errors import UnsupportedModel
from models.families import (
    cohere,
    deepseek,
    deepseek_v4,
    dense,
    gemma4,
    glm,
    hunyuan,
    hybrid,
    kimi_linear,
    lfm2,
    llama4,
    mistral,
    nemotron,
)
from models.families import deepseek_v32 as indexed
from models.families import experts as expert
from models.families.vision import SEEING, decoder_of
from models.hf.encoder_spec import encoder_spec, is_encoder
from models.hf.transformers_spec import transformers_spec
from models.pooling.pooling import is_embedder
from models.pooling.scoring import SCORER, is_scorer
from models.spec.config_fields import Config
from models.spec.model_spec import LONGROPE_LISTS, Implementation, ModelSpec, MoeSpec, RopeSpec, read_json
from models.spec.quantisation_config import read_quantisation, with_own_file
from models.text.turn_ends import turn_ends

_FAMILIES: dict[str, Callable[[Config], ModelSpec]] = {
    "LlamaForCausalLM": dense.llama,
    "MistralForCausalLM": dense.mistral,
    "Qwen2ForCausalLM": dense.qwen2,
    "Qwen3ForCausalLM": dense.qwen3,
    "Gemma2ForCausalLM": dense.gemma2,
    "Gemma3ForCausalLM": dense.gemma3,
    "Gemma4ForCausalLM": gemma4.gemma4,
    "Gemma4ForConditionalGeneration": gemma4.gemma4_of_texts,
    "Gemma4UnifiedForCausalLM": gemma4.gemma4,
    "Gemma4UnifiedForConditionalGeneration": gemma4.unified_of_texts,
    "GraniteForCausalLM": dense.granite,
    "Olmo2ForCausalLM": dense.olmo2,
    "Olmo3ForCausalLM": dense.olmo3,
    "Phi3ForCausalLM": dense.phi3,
    "SeedOssForCausalLM": dense.seed_oss,
    "SmolLM3ForCausalLM": dense.smollm3,
    "Exaone4ForCausalLM": dense.exaone4,
    "Ernie4_5ForCausalLM": dense.ernie4_5,
    "CohereForCausalLM": cohere.cohere,
    "Cohere2ForCausalLM": cohere.cohere2,
    "GlmForCausalLM": glm.glm,
    "Glm4ForCausalLM": glm.glm4,
    "MixtralForCausalLM": expert.mixtral,
    "Qwen2MoeForCausalLM": expert.qwen2_moe,
    "Qwen3MoeForCausalLM": expert.qwen3_moe,
    "Qwen3VLMoeTextModel": expert.qwen3_vl_moe,
    "GptOssForCausalLM": expert.gpt_oss,
    "MiniMaxM2ForCausalLM": expert.minimax_m2,
    "Dots1ForCausalLM": expert.dots1,
    "Ernie4_5_MoeForCausalLM": expert.ernie4_5_moe,
    "HunYuanDenseV1ForCausalLM": hunyuan.hunyuan,
    "HunYuanMoEV1ForCausalLM": hunyuan.hunyuan_moe,
    "Qwen3NextForCausalLM": hybrid.qwen3_next,
    "Qwen3_5ForCausalLM": hybrid.qwen3_5,
    "Qwen3_5MoeForCausalLM": hybrid.qwen3_5_moe,
    "GraniteMoeHybridForCausalLM": hybrid.granite_hybrid,
    "GraniteMoeForCausalLM": expert.granite_moe,
    "Lfm2ForCausalLM": lfm2.lfm2,
    "Lfm2MoeForCausalLM": lfm2.lfm2_moe,
    "NemotronHForCausalLM": nemotron.nemotron_h,
    "Glm4MoeForCausalLM": glm.glm4_moe,
    "Ministral3ForCausalLM": mistral.ministral3,
    "Mistral4ForCausalLM": mistral.mistral4,
    "Llama4ForCausalLM": llama4.llama4,
    "Llama4ForConditionalGeneration": llama4.llama4_of_texts,
    "DeepseekV2ForCausalLM": deepseek.deepseek_v2,
    "DeepseekV3ForCausalLM": deepseek.deepseek_v3,
    "KimiK25ForConditionalGeneration": deepseek.kimi_of_texts,
    "Kimi_K25ForConditionalGeneration": deepseek.kimi_of_texts,
    "KimiLinearForCausalLM": kimi_linear.kimi_linear,
    "Glm4MoeLiteForCausalLM": deepseek.deepseek_v3,
    "DeepseekV32ForCausalLM": indexed.deepseek_v32,
    "GlmMoeDsaForCausalLM": indexed.glm_moe_dsa,
    "DeepseekV4ForCausalLM": deepseek_v4.deepseek_v4,
}
_DEFAULTS = {
    name: defaults
    for family in (
        dense,
        cohere,
        expert,
        gemma4,
        hunyuan,
        hybrid,
        nemotron,
        kimi_linear,
        lfm2,
        glm,
        llama4,
        mistral,
        deepseek,
        indexed,
        deepseek_v4,
    )
    for name, defaults in family.DEFAULTS.items()
}
_SAMPLING_KEYS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


def read_spec(folder: Path, implementation: Implementation = "auto") -> ModelSpec:
    """Return the model in `folder`, without touching its weights. `implementation` says whose code is to compute its layers;
    `auto` means Baton's where there is some. Raises ConfigError and UnsupportedModel."""
    config = with_own_file(folder, read_json(folder / "config.json"))
    names = config.get("architectures") or ["(none)"]
    if names[0] in SEEING and implementation != "transformers":
        decoder, vision = decoder_of(folder, config, names[0])
        spec = _read(folder, decoder, decoder["architectures"], "baton")
        skipped = (*spec.skipped_prefixes, *vision.prefixes)
        return replace(spec, architecture=names[0], vision=vision, skipped_prefixes=skipped)
    return _read(folder, config, names, implementation)


def _read(folder: Path, config: Config, names: list[str], implementation: Implementation) -> ModelSpec:
    if is_encoder(config):
        return encoder_spec(folder, config, names[0])
    embeds = is_embedder(folder)
    ending = SCORER if is_scorer(config) else "Model" if embeds else ""
    if ending and names[0].endswith(ending):
        # A decoder that was saved without its head.
        embeds, names = True, [names[0].removesuffix(ending) + "ForCausalLM"]
        config = {**config, "architectures": names}
    if config.get("is_causal") is False:
        raise UnsupportedModel(
            "is_causal is false in config.json: attention to later tokens is not supported"
        )
    family = _FAMILIES.get(names[0])
    if implementation == "transformers" or (implementation == "auto" and family is None and not embeds):
        return _with_generation_config(transformers_spec(folder, config, names[0]), folder)
    if family is None:
        raise UnsupportedModel(
            f"architecture {names[0]!r} is not supported; of its own Baton has {', '.join(_FAMILIES)}"
        )
    try:
        quantisation = read_quantisation(config)
        spec = replace(
            family({**_DEFAULTS[names[0]], **config}), quantisation=quantisation, may_lack_head=embeds
        )
        _check(spec)
        return _with_generation_config(spec, folder)
    except KeyError as error:
        raise UnsupportedModel(f"config.json of {names[0]} lacks {error}") from None
    except (TypeError, ValueError) as error:
        raise UnsupportedModel(
            f"config.json or generation_config.json in {folder} holds a value of the wrong kind: {error}"
        ) from None


def _check(spec: ModelSpec) -> None:
    """Refuse what no weight's shape would show."""
    if spec.num_heads % spec.num_kv_heads:
        raise UnsupportedModel(
            f"num_attention_heads {spec.num_heads} is no multiple of num_key_value_heads {spec.num_kv_heads}"
        )
    if spec.rotated_dim % 2:
        raise UnsupportedModel(f"head_dim {spec.rotated_dim} is odd: rotary embeddings need pairs")
    for rope in (spec.rope, *spec.layer_ropes):
        rotated = rope.head_dim or spec.rotated_dim
        _check_longrope(rope, rotated)
        if rope.axes and len(rope.axes) != rotated // 2:
            raise UnsupportedModel(
                f"mrope_section has {len(rope.axes)} frequencies of {rotated // 2}: it must say of each which position "
                "it turns with"
            )
    if spec.moe is not None:
        _check_routing(spec.moe)
    if len(spec.windows) != spec.num_layers:
        raise UnsupportedModel(
            f"layer_types has {len(spec.windows)} entries for {spec.num_layers} num_hidden_layers"
        )


def _check_longrope(rope: RopeSpec, rotated_dim: int) -> None:
    for name in LONGROPE_LISTS if rope.kind == "longrope" else ():
        if len(rope.parameters[name]) != rotated_dim // 2:
            raise UnsupportedModel(
                f"{name} has {len(rope.parameters[name])} numbers for {rotated_dim // 2} rotated pairs"
            )


def _check_routing(moe: MoeSpec) -> None:
    routing = moe.routing
    if moe.num_experts % routing.num_groups:
        raise UnsupportedModel(
            f"{moe.num_experts} experts cannot be divided into n_group {routing.num_groups} groups"
        )
    if not 1 <= routing.top_groups <= routing.num_groups:
        raise UnsupportedModel(
            f"topk_group {routing.top_groups} is not between 1 and n_group {routing.num_groups}"
        )
    group_size = moe.num_experts // routing.num_groups
    if group_size < routing.group_best:
        raise UnsupportedModel(f"n_group {routing.num_groups} leaves {group_size} experts in a group")
    if routing.top_k > group_size * routing.top_groups:
        raise UnsupportedModel(
            f"num_experts_per_tok {routing.top_k} is more than the {group_size * routing.top_groups} experts to choose from"
        )


def _with_generation_config(spec: ModelSpec, folder: Path) -> ModelSpec:
    path = folder / "generation_config.json"
    generation = read_json(path) if path.exists() else {}
    ids = turn_ends(folder, spec.vocab_size)
    sampling = {key: float(generation[key]) for key in _SAMPLING_KEYS if generation.get(key) is not None}
    if generation.get("do_sample") is False:
        sampling["temperature"] = 0.0
    return replace(spec, eos_token_ids=ids, default_sampling=sampling)
