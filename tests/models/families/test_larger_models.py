"""The decoder of a model that also sees: its text is what transformers says of text alone."""

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from core.errors import UnsupportedModel
from models.families.table import read_spec
from models.registry import LoadOptions, load_model
from tests.models.checkpoints import BLOCK, CPU, FAMILIES, VOCAB, Paged

PREFIXES = ["model.language_model.", "language_model.model."]
"""What transformers writes today, and published checkpoints."""
PROMPT = [random.Random(1).randrange(2, VOCAB) for _ in range(30)]


def saved(model: Any, folder: Path) -> Any:
    model = model.float().eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    model.save_pretrained(folder)
    return model


def logits(model: Any) -> torch.Tensor:
    with torch.inference_mode():
        return model(torch.tensor([PROMPT])).logits[0]


def make_larger(folder: Path) -> torch.Tensor:
    """A tiny Gemma 3 that sees; what it says of `PROMPT`."""
    torch.manual_seed(3)
    vision = transformers.SiglipVisionConfig(
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        image_size=28,
        patch_size=14,
    )
    config = transformers.Gemma3Config(
        text_config=FAMILIES["gemma3"](random.Random(3), 3),
        vision_config=vision,
        mm_tokens_per_image=4,
        image_token_index=VOCAB - 1,
        boi_token_index=VOCAB - 2,
        eoi_token_index=VOCAB - 3,
        eos_token_id=[5, 6],
    )
    model = saved(transformers.Gemma3ForConditionalGeneration(config), folder)
    return logits(model)


def make_llama4(folder: Path) -> torch.Tensor:
    """A tiny Llama 4 that sees; what it says of `PROMPT`."""
    torch.manual_seed(3)
    vision = transformers.Llama4VisionConfig(
        hidden_size=16,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        image_size=28,
        patch_size=14,
        vision_output_dim=16,
        projector_input_dim=16,
        projector_output_dim=16,
    )
    config = transformers.Llama4Config(
        text_config=FAMILIES["llama4"](random.Random(3), 0), vision_config=vision, eos_token_id=[5, 6]
    )
    model = saved(transformers.Llama4ForConditionalGeneration(config), folder)
    return logits(model.language_model)


def make_kimi(folder: Path) -> torch.Tensor:
    """A tiny Kimi K2.5 that sees; what it says of `PROMPT`."""
    torch.manual_seed(3)
    vision = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.Kimi_K25Config(
        text_config=FAMILIES["deepseek_v3"](random.Random(3), 1),
        vision_config=vision,
        projection_hidden_size=16,
        eos_token_id=[5, 6],
        tie_word_embeddings=False,
    )
    model = saved(transformers.Kimi_K25ForConditionalGeneration(config), folder)
    path = folder / "model.safetensors"
    tensors = load_file(path)
    # transformers gives the decoder's layers the name of the tower's; published checkpoints have the decoder's own.
    save_file({name.replace("model.blocks.", "model.layers."): tensors[name] for name in tensors}, path)
    return logits(model)


def make_gemma4(folder: Path) -> torch.Tensor:
    """A tiny Gemma 4 that sees and hears; what it says of `PROMPT`."""
    torch.manual_seed(3)
    size = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    more = {"intermediate_size": 16, "num_key_value_heads": 2, "head_dim": 8, "position_embedding_size": 16}
    text = FAMILIES["gemma4_small"](random.Random(3), 0)
    text.pad_token_id = 0
    config = transformers.Gemma4Config(
        text_config=text,
        vision_config=transformers.Gemma4VisionConfig(**size, **more),
        audio_config=transformers.Gemma4AudioConfig(
            **size, output_proj_dims=16, subsampling_conv_channels=[4, 4]
        ),
        eos_token_id=[5, 6],
    )
    return logits(saved(transformers.Gemma4ForConditionalGeneration(config), folder))


def make_unified(folder: Path) -> torch.Tensor:
    """A tiny Gemma 4 without towers; what it says of `PROMPT`."""
    torch.manual_seed(3)
    own = FAMILIES["gemma4"](random.Random(3), 0).to_dict()
    text = {name: own[name] for name in own if "per_layer_input" not in name and "moe" not in name}
    for name in ("model_type", "num_experts", "top_k_experts", "architectures", "transformers_version"):
        text.pop(name, None)
    text["pad_token_id"] = 0
    config = transformers.Gemma4UnifiedConfig(
        text_config=transformers.Gemma4UnifiedTextConfig(**text),
        vision_config=transformers.Gemma4UnifiedVisionConfig(
            mm_embed_dim=16, mm_posemb_size=8, output_proj_dims=16, patch_size=2
        ),
        audio_config=transformers.Gemma4UnifiedAudioConfig(audio_embed_dim=8),
        eos_token_id=[5, 6],
    )
    return logits(saved(transformers.Gemma4UnifiedForConditionalGeneration(config), folder))


@pytest.mark.parametrize("prefix", PREFIXES)
@pytest.mark.parametrize("make", [make_larger, make_llama4, make_kimi, make_gemma4, make_unified])
def test_the_text_part_computes_what_transformers_does(
    make: Callable[[Path], torch.Tensor], prefix: str, tmp_path: Path
) -> None:
    want = make(tmp_path)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    written = next(n.partition("embed_tokens")[0] for n in tensors if n.endswith("embed_tokens.weight"))
    save_file({name.replace(written, prefix): tensor for name, tensor in tensors.items()}, path)
    model = load_model(tmp_path, "float32", CPU, options=LoadOptions(block_size=BLOCK))
    (found,) = Paged(model, 1, random.Random(0)).step([(0, 0, PROMPT)])
    torch.testing.assert_close(found, want, atol=1e-4, rtol=1e-4)
    assert model.spec.eos_token_ids == (5, 6)


def test_a_larger_model_without_a_text_part_is_refused(tmp_path: Path) -> None:
    make_llama4(tmp_path)
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps({**config, "text_config": None}))
    with pytest.raises(UnsupportedModel, match="text_config is None"):
        read_spec(tmp_path)
    del config["text_config"]
    path.write_text(json.dumps(config))
    with pytest.raises(UnsupportedModel, match="lacks 'text_config'"):
        read_spec(tmp_path)
