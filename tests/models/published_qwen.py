"""Rewrites checkpoints of Qwen-VL into the form of published ones."""

import json
from pathlib import Path

from safetensors.torch import load_file, save_file


def publish_qwen(folder: Path) -> None:
    """Rewrite a checkpoint as Qwen2-VL's were published: a flat configuration, and names without `language_model`."""
    config = json.loads((folder / "config.json").read_text())
    text = config.pop("text_config")
    rope = text.pop("rope_parameters")
    scaling = {"type": "mrope", "mrope_section": rope["mrope_section"]}
    vision = {**config["vision_config"], "model_type": "qwen2_vl"}
    flat = {
        **text,
        **config,
        "vision_config": vision,
        "rope_theta": rope["rope_theta"],
        "rope_scaling": scaling,
    }
    (folder / "config.json").write_text(json.dumps(flat))
    tensors = load_file(folder / "model.safetensors")
    names = {
        name: name.replace("model.language_model.", "model.").replace("model.visual.", "visual.")
        for name in tensors
    }
    save_file(
        {names[name]: tensor for name, tensor in tensors.items()},
        folder / "model.safetensors",
        {"format": "pt"},
    )
    said = json.loads((folder / "processor_config.json").read_text())
    (folder / "processor_config.json").unlink()
    images = {
        **said["image_processor"],
        "processor_class": said["processor_class"],
        "image_processor_type": "Qwen2VLImageProcessor",
    }
    size = images.pop("size")
    images |= {"min_pixels": size["shortest_edge"], "max_pixels": size["longest_edge"]}
    (folder / "preprocessor_config.json").write_text(json.dumps(images))


def publish_experts(folder: Path) -> None:
    """Transpose experts, as Qwen3-VL's have them. transformers does so when it saves a model that it has loaded."""
    path = folder / "model.safetensors"
    tensors = load_file(path)
    turned = {
        name: tensor.mT.contiguous() if ".experts." in name else tensor for name, tensor in tensors.items()
    }
    save_file(turned, path, {"format": "pt"})
