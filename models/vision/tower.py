"""The part of a model that sees: transformers' vision tower and projector, without the decoder between them and the text."""

from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor
from transformers import AutoConfig, AutoModel
from transformers.utils import logging as transformers_logging

from core.errors import UnsupportedModel
from models.spec.model_spec import ModelSpec
from models.spec.vision_spec import VisionSpec
from models.vision.image_reader import ImageReader

_DECODERS = ("language_model", "text_model")
_OF_FEW_BITS = ("_scale", "_scale_inv", ".scales", ".qweight", ".weight_packed")
"""Endings of the names of tensors that only quantised matrices have."""
_EXAMPLE = (96, 64)


class VisionTower:
    def __init__(self, folder: Path, spec: ModelSpec, dtype: torch.dtype, device: torch.device) -> None:
        """Read the weights, and check with an example that an image gets as many rows as tokens. Raises ConfigError and
        UnsupportedModel."""
        assert spec.vision is not None
        self._dtype, self._device = dtype, device
        self._reader = ImageReader(folder, spec.vision.token_id)
        self._model = _load(folder, spec.vision, dtype).to(device)
        self._check(spec)

    def rows(self, data: bytes) -> Tensor:
        """An encoded image -> (num_rows, hidden_size of the decoder, and as much for each layer behind which something is added
        to them). Raises UnreadableImage."""
        return self._rows(self._reader.pixels(data))

    @torch.inference_mode()
    def _rows(self, pixels: dict[str, Tensor]) -> Tensor:
        placed = {name: self._placed(name, tensor) for name, tensor in pixels.items()}
        made = self._model.get_image_features(**placed)
        each = [made.pooler_output, *getattr(made, "deepstack_features", ())]
        return torch.cat([torch.cat(list(rows)) for rows in each], 1).to(self._dtype)

    def _placed(self, name: str, tensor: Tensor) -> Tensor:
        if name == "image_sizes":  # numbers that the host counts with
            return tensor
        return tensor.to(self._device, self._dtype if tensor.is_floating_point() else tensor.dtype)

    def _check(self, spec: ModelSpec) -> None:
        assert spec.vision is not None
        image = Image.new("RGB", _EXAMPLE, "teal")
        made = tuple(self._rows(self._reader.pixels_of(image)).shape)
        num_rows = self._reader.layout(image).tokens.count(spec.vision.token_id)
        wanted = num_rows, spec.hidden_size * (1 + spec.vision.num_deep)
        if made != wanted:
            raise UnsupportedModel(
                f"architecture {spec.vision.architecture!r} is not supported: its tower makes {made} of an image for which its "
                f"processor writes {wanted}"
            )


def _load(folder: Path, vision: VisionSpec, dtype: torch.dtype) -> Any:
    """Return transformers' model with a decoder of no layers and one token, of which nothing is read. Raises UnsupportedModel."""
    config: Any = AutoConfig.from_pretrained(folder, local_files_only=True)
    if hasattr(config, "quantization_config"):
        del config.quantization_config  # it says which tensors of the decoder have few bits
    text = config.text_config
    text.num_hidden_layers, text.vocab_size, text.pad_token_id = 0, 1, None
    if getattr(text, "layer_types", None):
        text.layer_types = []
    level = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_error()  # it would list the decoder's tensors as unexpected
    try:
        model, report = AutoModel.from_pretrained(
            folder,
            config=config,
            dtype=dtype,
            local_files_only=True,
            use_safetensors=True,
            ignore_mismatched_sizes=True,
            output_loading_info=True,
        )
    except (OSError, ValueError, RuntimeError) as error:
        raise UnsupportedModel(f"transformers cannot load what sees in {folder}: {error}") from None
    finally:
        transformers_logging.set_verbosity(level)
    few = [name for name in report["unexpected_keys"] if name.startswith(vision.prefixes)]
    if few := sorted(name for name in few if name.endswith(_OF_FEW_BITS)):
        raise UnsupportedModel(
            f"the checkpoint in {folder} has {few[0]}: what sees is quantised, which is not supported; use one whose decoder "
            "alone is"
        )
    if missing := sorted(name for name in report["missing_keys"] if not name.startswith(_DECODERS)):
        raise UnsupportedModel(f"the checkpoint in {folder} lacks {', '.join(missing[:3])}")
    for name in _DECODERS:
        if hasattr(model, name):
            setattr(model, name, None)
    return model.eval()
