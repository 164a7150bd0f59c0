"""Tiny models of Qwen-VL and its kin, made by transformers, each with a tokenizer and a processor of its own."""

from typing import Any

import transformers

from tests.models.seeing_parts import TEXT, tokenizer_with
from tests.models.their_processors import TheirQwen

_TOWER = {"hidden_size": 16, "out_hidden_size": 32, "intermediate_size": 24}
_QWEN3S_TOWER = {**_TOWER, "num_position_embeddings": 36}


def _qwen(
    template: str, kind: str, vision: dict[str, Any], processor: str = "", **text: Any
) -> tuple[Any, Any]:
    """At least one of the four frequencies of a head turns with each position."""
    pads = ["<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"]
    tokenizer = tokenizer_with(*pads)
    config, model = (
        getattr(transformers, f"{kind}{what}") for what in ("Config", "ForConditionalGeneration")
    )
    rope = {"rope_type": "default", "rope_theta": 100.0, "mrope_section": [1, 1, 2]}
    sizes = {key: size for key, size in TEXT.items() if key != "head_dim"}
    made = {"vocab_size": len(tokenizer), "rope_parameters": rope, **sizes, **text}
    ids = tokenizer.convert_tokens_to_ids(pads)
    names = ("vision_start_token_id", "vision_end_token_id", "image_token_id", "video_token_id")
    whole = config(
        vision_config={"depth": 3, "num_heads": 2, "patch_size": 8, **vision},
        text_config=made,
        **dict(zip(names, ids, strict=True)),
    )
    return model(whole), TheirQwen(tokenizer, template, processor or f"{kind}Processor")


def qwen2_vl(template: str) -> tuple[Any, Any]:
    return _qwen(template, "Qwen2VL", {"embed_dim": 16, "hidden_size": 32, "mlp_ratio": 2})


def qwen25_vl(template: str) -> tuple[Any, Any]:
    windows = {"window_size": 32, "fullatt_block_indexes": [1]}
    return _qwen(template, "Qwen2_5_VL", _TOWER | windows)


def qwen3_vl(template: str) -> tuple[Any, Any]:
    tower, text = _qwen3_parts()
    return _qwen(template, "Qwen3VL", tower, **text)


def qwen3_vl_moe(template: str) -> tuple[Any, Any]:
    """The second layer is dense."""
    experts = {
        "num_experts": 6,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 20,
        "mlp_only_layers": [1],
    }
    tower, text = _qwen3_parts()
    return _qwen(template, "Qwen3VLMoe", tower, "Qwen3VLProcessor", **text, **experts)


def _qwen3_parts() -> tuple[dict[str, Any], dict[str, Any]]:
    """Something is added to images' tokens behind two of four layers."""
    deep = {"deepstack_visual_indexes": [0, 2]}
    turns = {"mrope_section": [2, 1, 1], "mrope_interleaved": True}
    rope = {"rope_type": "default", "rope_theta": 100.0, **turns}
    text = {"head_dim": 8, "num_hidden_layers": 4, "rope_parameters": rope}
    return _QWEN3S_TOWER | deep, text


def qwen3_5(template: str) -> tuple[Any, Any]:
    return _qwen(template, "Qwen3_5", _QWEN3S_TOWER, "Qwen3VLProcessor", **_hybrid())


def qwen3_5_moe(template: str) -> tuple[Any, Any]:
    experts = {"num_experts": 6, "num_experts_per_tok": 2}
    sizes = {"moe_intermediate_size": 20, "shared_expert_intermediate_size": 12}
    return _qwen(template, "Qwen3_5Moe", _QWEN3S_TOWER, "Qwen3VLProcessor", **_hybrid(), **experts, **sizes)


def _hybrid() -> dict[str, Any]:
    """Every second layer attends, and half of each head turns."""
    turns = {"mrope_section": [2, 1, 1], "mrope_interleaved": True, "partial_rotary_factor": 0.5}
    return {
        "head_dim": 16,
        "num_hidden_layers": 4,
        "layer_types": ["linear_attention", "full_attention"] * 2,
        "rope_parameters": {"rope_type": "default", "rope_theta": 100.0, **turns},
        "rms_norm_eps": 1e-3,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 32,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
    }
