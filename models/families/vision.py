"""Which architectures read images, and the description of each: its decoder is one of Baton's own, and transformers computes
what sees. An image's positions are those of text, or lie in a plane (`core.prompt_images.PromptImage.columns`). Attention is
causal within it, too, but in Gemma 3."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from models.hf.transformers_config import refused, transformers_config
from models.spec.model_spec import read_json
from models.spec.vision_spec import VisionSpec

Config = Mapping[str, Any]

_TOWERS = {
    "LlavaForConditionalGeneration": ("clip_vision_model", "siglip_vision_model", "pixtral"),
    "LlavaNextForConditionalGeneration": ("clip_vision_model", "siglip_vision_model"),
    "Mistral3ForConditionalGeneration": ("pixtral",),
    "Idefics3ForConditionalGeneration": ("idefics3_vision", "idefics3"),
    "InternVLForConditionalGeneration": ("internvl_vision",),
    "Qwen2VLForConditionalGeneration": ("qwen2_vl_vision",),
    "Qwen2_5_VLForConditionalGeneration": ("qwen2_5_vl_vision",),
    "Qwen3VLForConditionalGeneration": ("qwen3_vl_vision",),
    "Qwen3VLMoeForConditionalGeneration": ("qwen3_vl_moe_vision",),
    "Qwen3_5ForConditionalGeneration": ("qwen3_5_vision",),
    "Qwen3_5MoeForConditionalGeneration": ("qwen3_5_moe_vision",),
    "Gemma3ForConditionalGeneration": ("siglip_vision_model",),
}
"""The towers of each architecture, by transformers' names."""
_DECODERS = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "ministral3": "Ministral3ForCausalLM",
    "mistral4": "Mistral4ForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen2_vl_text": "Qwen2ForCausalLM",
    "qwen2_5_vl_text": "Qwen2ForCausalLM",
    "qwen3_vl_text": "Qwen3ForCausalLM",
    "qwen3_vl_moe_text": "Qwen3VLMoeTextModel",
    "qwen3_5_text": "Qwen3_5ForCausalLM",
    "qwen3_5_moe_text": "Qwen3_5MoeForCausalLM",
    "gemma3_text": "Gemma3ForCausalLM",
}
_PARTS = (
    "vision_tower.",
    "vision_model.",
    "visual.",
    "multi_modal_projector.",
    "connector.",
    "image_newline",
)
"""Beginnings of the names of tensors that are not the decoder's, behind `model.` or not."""
_TILE_EDGE, _TILED_EDGE = 364, 4 * 364
"""What Idefics3's processor cuts an image into, and how long its longer side is before, unless its files say otherwise."""
_MOST_TILES = 12
"""Tiles that InternVL's processor cuts an image into, at the most, unless its files say otherwise."""
_MOST_PIXELS = 28 * 28 * 1280
"""Pixels of what Qwen-VL's processor makes of an image, at the most, unless its files say otherwise."""

SEEING = frozenset(_TOWERS)


def decoder_of(folder: Path, config: Config, architecture: str) -> tuple[dict[str, Any], VisionSpec]:
    """Return the decoder's configuration, as if it were a model of its own, and what sees. Raises UnsupportedModel by name."""
    found = transformers_config(folder, architecture)
    text, vision = found.text_config, found.vision_config
    if text.model_type not in _DECODERS:
        raise refused(
            architecture, f"its decoder is {text.model_type!r} ({', '.join(_DECODERS)} are supported)"
        )
    if vision.model_type not in _TOWERS[architecture]:
        towers = ", ".join(_TOWERS[architecture])
        raise refused(architecture, f"its vision tower is {vision.model_type!r} ({towers} are supported)")
    if not 0 <= found.image_token_id < text.vocab_size:
        raise refused(
            architecture,
            f"its token for images, {found.image_token_id}, is outside the vocabulary of {text.vocab_size}",
        )
    decoder = {
        **text.to_dict(),
        "architectures": [_DECODERS[text.model_type]],
        "tie_word_embeddings": found.tie_word_embeddings,
        "dtype": config.get("dtype") or config.get("torch_dtype") or text.dtype,
    }
    if quantised := config.get("quantization_config"):
        decoder["quantization_config"] = quantised  # of its tensors; the tower's are checked as they are read
    width = getattr(vision, "embed_dim", vision.hidden_size)  # Qwen2-VL's hidden size is that of its rows
    return decoder, VisionSpec(
        architecture=architecture,
        token_id=found.image_token_id,
        num_patches=_num_patches(folder, found),
        num_layers=vision.num_hidden_layers,
        hidden_size=width,
        intermediate_size=getattr(vision, "intermediate_size", 0) or width * vision.mlp_ratio,
        prefixes=(*_PARTS, *(f"model.{part}" for part in _PARTS)),
        num_deep=len(getattr(vision, "deepstack_visual_indexes", ())),
        whole_rows=getattr(found, "mm_tokens_per_image", 0),
    )


def _num_patches(folder: Path, config: Any) -> int:
    """Return the most patches, with each tile's class token, that one image becomes."""
    vision, grids = config.vision_config, getattr(config, "image_grid_pinpoints", None)
    if vision.model_type.startswith("qwen"):
        return _most_pixels(folder) // _edge(vision.patch_size) ** 2
    edge = _edge(vision.image_size)
    num_tiles = 1
    if grids:  # LLaVA-NeXT: the image made as small as a tile, and the tiles of the finest grid
        num_tiles += max(-(-height // edge) * -(-width // edge) for height, width in grids)
    elif vision.model_type.startswith("idefics3"):
        num_tiles += _num_cuts(folder) ** 2
    elif vision.model_type == "internvl_vision":
        num_tiles += int(_said_of_sizes(folder).get("max_patches") or _MOST_TILES)
    return num_tiles * ((edge // _edge(vision.patch_size)) ** 2 + 1)


def _num_cuts(folder: Path) -> int:
    """Return into how many tiles Idefics3's processor cuts the longer side."""
    said = _said_of_sizes(folder)
    tile = (said.get("max_image_size") or {}).get("longest_edge") or _TILE_EDGE
    whole = (said.get("size") or {}).get("longest_edge") or _TILED_EDGE
    return -(-whole // tile)


def _most_pixels(folder: Path) -> int:
    """Return how many pixels Qwen-VL's processor makes of an image at the most."""
    said = _said_of_sizes(folder)
    size = said.get("size") or {}
    most = said.get("max_pixels") or size.get("longest_edge") or size.get("max_pixels") or _MOST_PIXELS
    return max(most, said.get("min_pixels") or size.get("shortest_edge") or 0)


def _said_of_sizes(folder: Path) -> dict[str, Any]:
    """Return what a processor's files say of the sizes of images."""
    said: dict[str, Any] = {}
    for name in ("preprocessor_config.json", "processor_config.json"):
        if (folder / name).exists():
            content = read_json(folder / name)
            said |= content.get("image_processor", content)
    return said


def _edge(size: int | list[int] | tuple[int, int]) -> int:
    return size if isinstance(size, int) else max(size)
