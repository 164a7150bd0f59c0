"""Models that read images: their rows and tokens are transformers' own, and what cannot be done is refused by name."""

import json
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
import torch

from core.config.cluster_config import EngineConfig, ModelConfig
from core.errors import ConfigError, UnsupportedModel
from engine.sizing.pool_size import size_pool
from models.families.table import read_spec
from models.registry import check_load_format
from models.vision.image_reader import ImageReader, UnreadableImage, open_image
from models.vision.tower import VisionTower
from parallel.mesh import Mesh
from tests.models.checkpoints import CPU
from tests.models.seeing_checkpoints import (
    SEEING,
    asked_of,
    encoded,
    make_image,
    make_seeing,
    said,
    shown,
)

SIZES = [(60, 45), (90, 30), (31, 77), (64, 64), (8, 30), (200, 10), (33, 32), (57, 113), (17, 16)]


@pytest.mark.slow
@pytest.mark.parametrize("family", SEEING)
def test_an_image_of_any_size_has_as_many_rows_as_tokens_and_both_are_transformers_own(
    family: str, tmp_path: Path
) -> None:
    reference, processor = make_seeing(tmp_path, family)
    spec = read_spec(tmp_path)
    assert spec.vision is not None
    tower, reader = (
        VisionTower(tmp_path, spec, torch.float32, CPU),
        ImageReader(tmp_path, spec.vision.token_id),
    )
    names = processor.image_processor.model_input_names
    for seed, (width, height) in enumerate(SIZES):
        image = make_image(seed, width, height)
        theirs = asked_of(
            processor, [{"role": "user", "content": [said("a"), shown(image), said("b")]}], [image]
        )
        ids, tokens = theirs["input_ids"][0].tolist(), reader.layout(image).tokens
        at = next(at for at in range(len(ids)) if ids[at : at + len(tokens)] == tokens)
        assert spec.vision.token_id not in ids[:at] + ids[at + len(tokens) :]
        rows = tower.rows(encoded(image))
        assert len(rows) == tokens.count(spec.vision.token_id), (width, height)
        with torch.inference_mode():
            made = reference.model.get_image_features(
                **{name: theirs[name] for name in names if name in theirs}
            )
        each = [made.pooler_output, *getattr(made, "deepstack_features", ())]
        torch.testing.assert_close(rows, torch.cat([torch.cat(list(one)) for one in each], 1))


def test_the_tower_is_counted_before_a_weight_is_read(tmp_path: Path) -> None:
    reference, _ = make_seeing(tmp_path, "llava")
    parts = [reference.model.vision_tower, reference.model.multi_modal_projector]
    num_bytes = sum(parameter.numel() * 4 for part in parts for parameter in part.parameters())

    def needs(mesh: Mesh) -> list[int]:
        sized = size_pool(tmp_path, ModelConfig(dtype="float32"), EngineConfig(num_blocks=8), mesh)
        return [need.weight_bytes for need in sized.needs]

    config = json.loads((tmp_path / "config.json").read_text())
    text = {**config["text_config"], "architectures": ["LlamaForCausalLM"], "tie_word_embeddings": False}
    seeing = needs(Mesh(pp=2))
    (tmp_path / "config.json").write_text(json.dumps(text))
    assert [with_it - without for with_it, without in zip(seeing, needs(Mesh(pp=2)), strict=True)] == [
        num_bytes,
        0,
    ]


def change(folder: Path, **fields: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"quantization_config": {"quant_method": "quanto"}}, r"\(quanto\)"),
        ({"vision_config": {"model_type": "dinov2"}}, "vision tower is 'dinov2'"),
        ({"text_config": {"model_type": "gemma"}}, "decoder is 'gemma'"),
        ({"image_token_index": 5000}, "outside the vocabulary of 4097"),
        (
            {"architectures": ["LlavaOnevisionForConditionalGeneration"]},
            "LlavaOnevisionForConditionalGeneration",
        ),
        ({"architectures": ["Qwen2_5_VLForConditionalGeneration"]}, "vision tower is 'clip_vision_model'"),
    ],
)
def test_what_cannot_be_done_is_refused_by_name_before_a_weight_is_read(
    fields: dict[str, Any], says: str, tmp_path: Path
) -> None:
    make_seeing(tmp_path, "llava")
    (tmp_path / "model.safetensors").unlink()
    change(tmp_path, **fields)
    with pytest.raises(UnsupportedModel, match=says):
        read_spec(tmp_path)


def test_a_stage_without_the_layers_that_images_go_into_is_refused(tmp_path: Path) -> None:
    make_seeing(tmp_path, "qwen3_vl")
    size_pool(tmp_path, ModelConfig(), EngineConfig(num_blocks=8), Mesh(pp=2))
    with pytest.raises(
        UnsupportedModel, match="first 2 layers, which must be on one stage: use a smaller pp"
    ):
        size_pool(tmp_path, ModelConfig(), EngineConfig(num_blocks=8), Mesh(pp=4))


def test_steps_that_would_cut_an_image_which_must_stay_whole_are_refused(tmp_path: Path) -> None:
    make_seeing(tmp_path, "gemma3")
    for num_tokens, num_seqs in ((9, 1), (16, 8)):
        engine = EngineConfig(num_blocks=8, max_batch_tokens=num_tokens, max_num_seqs=num_seqs)
        size_pool(tmp_path, ModelConfig(), engine)
        with pytest.raises(ConfigError, match=f"all 9 tokens of an image .* set {num_tokens} or more"):
            size_pool(tmp_path, ModelConfig(), engine.model_copy(update={"max_batch_tokens": num_tokens - 1}))


def test_crops_of_images_are_refused(tmp_path: Path) -> None:
    make_seeing(tmp_path, "gemma3")
    path = tmp_path / "processor_config.json"
    content = json.loads(path.read_text())
    content["image_processor"]["do_pan_and_scan"] = True
    path.write_text(json.dumps(content))
    spec = read_spec(tmp_path)
    assert spec.vision is not None
    with pytest.raises(UnsupportedModel, match="do_pan_and_scan"):
        ImageReader(tmp_path, spec.vision.token_id)


def test_dummy_weights_and_a_processor_of_another_token_are_refused(tmp_path: Path) -> None:
    make_seeing(tmp_path, "llava")
    spec = read_spec(tmp_path)
    with pytest.raises(UnsupportedModel, match="dummy"):
        check_load_format(spec, "dummy")
    with pytest.raises(UnsupportedModel, match="writes token 4096 for images; config.json says 7"):
        ImageReader(tmp_path, 7)


def test_an_image_of_one_row_is_refused_where_transformers_fails_with_it(tmp_path: Path) -> None:
    make_seeing(tmp_path, "mistral3")
    spec = read_spec(tmp_path)
    assert spec.vision is not None
    with pytest.raises(UnreadableImage, match="too small for this model: 8 x 8 pixels"):
        ImageReader(tmp_path, spec.vision.token_id).layout(make_image(1, 8, 8))


def test_images_are_upright_and_without_transparency() -> None:
    image = make_image(1, 40, 20)
    exif = image.getexif()
    exif[0x0112] = 6
    path = encoded(image.convert("RGBA"))
    assert open_image(path).mode == "RGB"
    out = BytesIO()
    image.save(out, "JPEG", exif=exif)
    assert open_image(out.getvalue()).size == (20, 40)
    with pytest.raises(UnreadableImage, match="pixels"):
        open_image(encoded(image), max_pixels=799)
