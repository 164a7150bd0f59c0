"""Tiny models that read images, made by transformers, each with a tokenizer and a processor of its own; and images."""

import base64
from collections.abc import Mapping, Sequence
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from PIL import Image
from transformers import AutoTokenizer

from models.files.hub import resolve
from tests.models import seeing_qwens
from tests.models.published_qwen import publish_experts
from tests.models.seeing_parts import TEXT, VISION, tokenizer_with
from tests.models.their_processors import TheirInternVL, TheirPixtral

TEMPLATE = (
    "{%- for message in messages -%}<|{{ message.role }}|>\n"
    "{%- if message.content is string -%}{{ message.content }}{%- else -%}"
    "{%- for part in message.content -%}"
    "{%- if part.type == 'image' -%}IMAGE{%- else -%}{{ part.text }}{%- endif -%}"
    "{%- endfor -%}{%- endif -%}\n{%- endfor -%}"
    "{%- if add_generation_prompt -%}<|assistant|>\n{%- endif -%}"
)
"""Takes a text and parts. IMAGE is the family's own token."""
PARTS_ALONE = TEMPLATE.replace("message.content is string", "false")
"""As LLaVA's own template: a text that is no list of parts is lost."""


def make_seeing(folder: Path, family: str, template: str = TEMPLATE) -> tuple[Any, Any]:
    """Return (reference, processor); `folder` is what a server takes as its model."""
    torch.manual_seed(5)
    model, processor = _FAMILIES[family](template)
    model = model.float().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            spread = 0.3 if parameter.ndim == 1 else 1.6 / parameter[0].numel() ** 0.5
            parameter.add_(torch.randn_like(parameter) * (1.0 if "embed_tokens" in name else spread))
    model.generation_config.eos_token_id = None
    model.save_pretrained(folder)
    if family == "qwen3_vl_moe":
        publish_experts(folder)
    processor.save_pretrained(folder)
    return model, processor


def make_image(seed: int, width: int = 60, height: int = 45) -> Image.Image:
    """Noise in large squares, so that resizing leaves images different."""
    rng = np.random.default_rng(seed)
    small = rng.integers(0, 256, (4, 5, 3), np.uint8)
    return Image.fromarray(small).resize((width, height), Image.Resampling.NEAREST)


def encoded(image: Image.Image, kind: str = "PNG") -> bytes:
    out = BytesIO()
    image.save(out, kind)
    return out.getvalue()


def data_url(data: bytes, kind: str = "png") -> str:
    return f"data:image/{kind};base64,{base64.b64encode(data).decode()}"


def shown(image: Image.Image) -> dict[str, Any]:
    """Return a part of a message."""
    return {"type": "image_url", "image_url": {"url": data_url(encoded(image))}}


def said(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


def talks() -> list[tuple[list[dict[str, Any]], list[Image.Image]]]:
    """Return (messages, their images): one image, two in two turns, one twice, and text alone."""
    one, other, wide = make_image(1), make_image(2), make_image(3, 90, 30)
    return [
        ([{"role": "user", "content": [shown(one), said("What is this?")]}], [one]),
        ([{"role": "user", "content": [said("Before "), shown(wide), said(" and after.")]}], [wide]),
        ([{"role": "user", "content": [shown(other), said("What is this?")]}], [other]),
        (
            [
                {"role": "user", "content": [shown(one), said("What is this?")]},
                {"role": "assistant", "content": "An image."},
                {"role": "user", "content": [said("And this one?"), shown(other)]},
            ],
            [one, other],
        ),
        ([{"role": "user", "content": [shown(other), shown(other)]}], [other, other]),
        ([{"role": "user", "content": "Text alone."}], []),
    ]


def greedy_over(
    reference: Any,
    processor: Any,
    messages: Sequence[Mapping[str, Any]],
    images: Sequence[Image.Image],
    count: int,
    **more: Any,
) -> tuple[int, ...]:
    """Return what transformers itself generates: its template, its processor over all images at once, its model."""
    inputs = {**asked_of(processor, messages, images), **more}
    with torch.inference_mode():
        out = reference.generate(**inputs, max_new_tokens=count, do_sample=False, pad_token_id=0)
    return tuple(out[0, inputs["input_ids"].shape[1] :].tolist())


def asked_of(processor: Any, messages: Sequence[Mapping[str, Any]], images: Sequence[Image.Image]) -> Any:
    """Return transformers' inputs. `messages` are as clients send them."""
    plain = [
        {**message, "content": [_as_theirs(part) for part in message["content"]]}
        if isinstance(message["content"], list)
        else message
        for message in messages
    ]
    text = processor.apply_chat_template(plain, add_generation_prompt=True, tokenize=False)
    return processor(text=[text], images=list(images) or None, return_tensors="pt", add_special_tokens=False)


def _as_theirs(part: Mapping[str, Any]) -> Mapping[str, Any]:
    return part if part["type"] == "text" else {"type": "image"}


def _llava(template: str) -> tuple[Any, Any]:
    tokenizer = tokenizer_with("<image>")
    config = transformers.LlavaConfig(
        vision_config=transformers.CLIPVisionConfig(**VISION, image_size=32, patch_size=8, projection_dim=16),
        text_config=transformers.LlamaConfig(**TEXT, vocab_size=len(tokenizer)),
        image_token_index=tokenizer.convert_tokens_to_ids("<image>"),
        image_seq_length=16,
    )
    images = transformers.CLIPImageProcessorPil(
        size={"shortest_edge": 32}, crop_size={"height": 32, "width": 32}
    )
    processor = _over_clip(transformers.LlavaProcessor, images, tokenizer, template)
    return transformers.LlavaForConditionalGeneration(config), processor


def _llava_next(template: str) -> tuple[Any, Any]:
    tokenizer, grids = tokenizer_with("<image>"), [[32, 64], [64, 32], [64, 64]]
    config = transformers.LlavaNextConfig(
        vision_config=transformers.CLIPVisionConfig(**VISION, image_size=32, patch_size=8, projection_dim=16),
        text_config=transformers.MistralConfig(**TEXT, vocab_size=len(tokenizer), sliding_window=None),
        image_token_index=tokenizer.convert_tokens_to_ids("<image>"),
        image_grid_pinpoints=grids,
    )
    images = transformers.LlavaNextImageProcessorPil(
        size={"shortest_edge": 32}, crop_size={"height": 32, "width": 32}, image_grid_pinpoints=grids
    )
    processor = _over_clip(transformers.LlavaNextProcessor, images, tokenizer, template)
    return transformers.LlavaNextForConditionalGeneration(config), processor


def _over_clip(kind: Any, images: Any, tokenizer: Any, template: str) -> Any:
    """Return a processor for CLIP's tower, whose first token is no part of the image."""
    return kind(
        images,
        tokenizer,
        patch_size=8,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        chat_template=template.replace("IMAGE", "<image>"),
    )


def _pixtral_parts(
    template: str, merge: int, text: Any = transformers.MistralConfig
) -> tuple[TheirPixtral, dict[str, Any]]:
    tokenizer = tokenizer_with("[IMG]", "[IMG_BREAK]", "[IMG_END]")
    vision = transformers.PixtralVisionConfig(**VISION, image_size=64, patch_size=8)
    text = text(**TEXT, vocab_size=len(tokenizer), sliding_window=None)
    token = tokenizer.convert_tokens_to_ids("[IMG]")
    parts = {"vision_config": vision, "text_config": text, "image_token_index": token}
    return TheirPixtral(tokenizer, template, merge), parts


def _pixtral(template: str) -> tuple[Any, Any]:
    processor, parts = _pixtral_parts(template, 1)
    config = transformers.LlavaConfig(**parts, vision_feature_layer=-1, vision_feature_select_strategy="full")
    return transformers.LlavaForConditionalGeneration(config), processor


def _mistral3(template: str) -> tuple[Any, Any]:
    processor, parts = _pixtral_parts(template, 2)
    config = transformers.Mistral3Config(**parts, tie_word_embeddings=False)
    return transformers.Mistral3ForConditionalGeneration(config), processor


def _ministral3(template: str) -> tuple[Any, Any]:
    processor, parts = _pixtral_parts(template, 2, transformers.Ministral3Config)
    config = transformers.Mistral3Config(**parts, tie_word_embeddings=False)
    return transformers.Mistral3ForConditionalGeneration(config), processor


def _siglip(template: str) -> tuple[Any, Any]:
    tokenizer = tokenizer_with("<image>")
    config = transformers.LlavaConfig(
        vision_config=transformers.SiglipVisionConfig(**VISION, image_size=32, patch_size=8),
        text_config=transformers.Qwen2Config(
            **{key: size for key, size in TEXT.items() if key != "head_dim"}, vocab_size=len(tokenizer)
        ),
        image_token_index=tokenizer.convert_tokens_to_ids("<image>"),
        vision_feature_layer=-1,
        vision_feature_select_strategy="full",
    )
    processor = transformers.LlavaProcessor(
        transformers.SiglipImageProcessorPil(size={"height": 32, "width": 32}),
        tokenizer,
        patch_size=8,
        vision_feature_select_strategy="full",
        chat_template=template.replace("IMAGE", "<image>"),
    )
    return transformers.LlavaForConditionalGeneration(config), processor


def _idefics3(template: str) -> tuple[Any, Any]:
    rows = [f"<row_{row}_col_{column}>" for row in range(1, 3) for column in range(1, 3)]
    tokenizer = tokenizer_with(
        "<image>", "<fake_token_around_image>", "<end_of_utterance>", "<global-img>", *rows
    )
    config = transformers.Idefics3Config(
        vision_config=transformers.Idefics3VisionConfig(**VISION, image_size=32, patch_size=8)
        if hasattr(transformers, "Idefics3VisionConfig")
        else {**VISION, "image_size": 32, "patch_size": 8},
        text_config=transformers.LlamaConfig(**TEXT, vocab_size=len(tokenizer)),
        image_token_id=tokenizer.convert_tokens_to_ids("<image>"),
        scale_factor=2,
    )
    images = transformers.Idefics3ImageProcessorPil(
        size={"longest_edge": 64}, max_image_size={"longest_edge": 32}
    )
    processor = transformers.Idefics3Processor(
        images, tokenizer, image_seq_len=4, chat_template=template.replace("IMAGE", "<image>")
    )
    return transformers.Idefics3ForConditionalGeneration(config), processor


def _internvl(template: str) -> tuple[Any, Any]:
    names = {
        "start_image_token": "<img>",
        "end_image_token": "</img>",
        "context_image_token": "<IMG_CONTEXT>",
        "video_token": "<video>",
    }
    tokenizer = AutoTokenizer.from_pretrained(resolve("embedded"), extra_special_tokens=names)
    tokenizer.chat_template = None
    text = {key: size for key, size in TEXT.items() if key != "head_dim"}
    config = transformers.InternVLConfig(
        vision_config=transformers.InternVLVisionConfig(**VISION, image_size=[32, 32], patch_size=[8, 8]),
        text_config=transformers.Qwen2Config(**text, vocab_size=len(tokenizer)),
        image_token_id=tokenizer.convert_tokens_to_ids("<IMG_CONTEXT>"),
        image_seq_length=TheirInternVL.image_seq_length,
    )
    return transformers.InternVLForConditionalGeneration(config), TheirInternVL(tokenizer, template)


def _gemma3(template: str) -> tuple[Any, Any]:
    """The window of three of four layers is smaller than an image, whose patches are taken together by fours."""
    names = {
        "boi_token": "<start_of_image>",
        "eoi_token": "<end_of_image>",
        "image_token": "<image_soft_token>",
    }
    tokenizer = AutoTokenizer.from_pretrained(resolve("embedded"), extra_special_tokens=names)
    tokenizer.chat_template = None
    boi, eoi, rows = (tokenizer.convert_tokens_to_ids(name) for name in names.values())
    kinds = ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"]
    config = transformers.Gemma3Config(
        vision_config=transformers.SiglipVisionConfig(**VISION, image_size=48, patch_size=8),
        text_config=transformers.Gemma3TextConfig(
            **{**TEXT, "num_hidden_layers": len(kinds)},
            vocab_size=len(tokenizer),
            sliding_window=6,
            layer_types=kinds,
            query_pre_attn_scalar=8,
        ),
        mm_tokens_per_image=9,
        boi_token_index=boi,
        eoi_token_index=eoi,
        image_token_index=rows,
        tie_word_embeddings=False,
    )
    images = transformers.Gemma3ImageProcessorPil(size={"height": 48, "width": 48})
    processor = transformers.Gemma3Processor(
        images, tokenizer, chat_template=template.replace("IMAGE", "<start_of_image>"), image_seq_length=9
    )
    return transformers.Gemma3ForConditionalGeneration(config), processor


_FAMILIES = {
    "llava": _llava,
    "llava_siglip": _siglip,
    "llava_next": _llava_next,
    "pixtral": _pixtral,
    "mistral3": _mistral3,
    "ministral3": _ministral3,
    "idefics3": _idefics3,
    "internvl": _internvl,
    "qwen2_vl": seeing_qwens.qwen2_vl,
    "qwen2_5_vl": seeing_qwens.qwen25_vl,
    "qwen3_vl": seeing_qwens.qwen3_vl,
    "qwen3_vl_moe": seeing_qwens.qwen3_vl_moe,
    "qwen3_5": seeing_qwens.qwen3_5,
    "qwen3_5_moe": seeing_qwens.qwen3_5_moe,
    "gemma3": _gemma3,
}
SEEING = tuple(_FAMILIES)
