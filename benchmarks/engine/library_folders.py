"""The embedded model as the library of compressed-tensors stores it, in formats that are read here and not written."""

import json
import shutil
from pathlib import Path
from typing import Any, Final

from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import (
    QuantizationArgs,
    QuantizationConfig,
    QuantizationScheme,
    QuantizationStatus,
)
from compressed_tensors.quantization.quant_scheme import preset_name_to_scheme
from compressed_tensors.quantization.utils import calculate_qparams
from safetensors.torch import load_file, save_file
from torch import Tensor

from models.files.hub import resolve

FORMATS: Final = {
    "MXFP4A16": "mxfp4-pack-quantized",
    "MXFP8A16": "mxfp8-quantized",
    "W4A16_ASYM": "pack-quantized",
    "W8A16": "pack-quantized",
}
"""The library's presets, and what it calls the way in which they are stored."""
_GROUP: Final = 64
"""Inputs that share a scale of whole numbers: 128 do not divide the model's MLP."""


def write_by_library(preset: str, folder: Path) -> None:
    """Write the folder `folder`, with the least and the largest number of each group as its range."""
    source, form = resolve("embedded"), FORMATS[preset]
    scheme = preset_name_to_scheme(preset, ["Linear"])
    args = scheme.weights
    assert args is not None
    if form == "pack-quantized":
        args.group_size = _GROUP
    folder.mkdir()
    for path in source.glob("*.json"):
        shutil.copy(path, folder)
    stored: dict[str, Tensor] = {}
    for name, tensor in load_file(source / "model.safetensors").items():
        is_matrix = tensor.ndim == 2 and ".layers." in name
        stored |= _compressed(name, tensor.float(), scheme, args, form) if is_matrix else {name: tensor}
    save_file(stored, folder / "model.safetensors", {"format": "pt"})
    how: Any = QuantizationConfig(
        config_groups={"group_0": scheme},
        format=form,
        quantization_status=QuantizationStatus.COMPRESSED,
        ignore=["lm_head"],
    ).model_dump(mode="json")
    config = json.loads((source / "config.json").read_text()) | {"quantization_config": how}
    (folder / "config.json").write_text(json.dumps(config))


def _compressed(
    name: str, matrix: Tensor, scheme: QuantizationScheme, args: QuantizationArgs, form: str
) -> dict[str, Tensor]:
    groups = matrix.unflatten(1, (-1, args.group_size or matrix.shape[1]))
    scales, zeros = calculate_qparams(groups.amin(2), groups.amax(2), args)
    state: dict[str, Tensor | None] = {"weight": matrix, "weight_scale": scales}
    if not args.symmetric:
        state["weight_zero_point"] = zeros
    made = BaseCompressor.get_value_from_registry(form).compress(state, scheme)
    stem = name.removesuffix(".weight")
    return {f"{stem}.{suffix}": part.contiguous() for suffix, part in made.items() if part is not None}
