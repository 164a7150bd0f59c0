"""The processor of Gemma 3: transformers' pixels, and an image's tokens between two of its own.

Empty lines stand before and behind each image. They are text to the tokenizer, which joins them with others beside them. So
they are written into the prompt's text, and are none of the image's tokens. Images are never cut ("pan and scan")."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from core.errors import UnsupportedModel
from models.spec.model_spec import read_json

NAME = "Gemma3Processor"
_USUAL_ROWS = 256


class Gemma3Images:
    """Does what `models.vision.image_reader.ImageReader` asks of a processor of transformers."""

    both_ways = True
    around = "\n\n"

    def __init__(self, folder: Path) -> None:
        """Raises ConfigError, UnsupportedModel, OSError and ValueError."""
        from transformers import AutoImageProcessor, AutoTokenizer  # noqa: PLC0415 (seconds)

        self.image_processor: Any = AutoImageProcessor.from_pretrained(
            folder, local_files_only=True, backend="pil"
        )
        if self.image_processor.do_pan_and_scan:
            raise UnsupportedModel(
                f"do_pan_and_scan is set in {folder}: images that are cut into crops are not supported; set it to false"
            )
        tokenizer: Any = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        self.image_token: str = tokenizer.boi_token
        self.placeholder_id, self.image_token_id = tokenizer.boi_token_id, tokenizer.image_token_id
        path = folder / "processor_config.json"
        num_rows = int((read_json(path) if path.exists() else {}).get("image_seq_length") or _USUAL_ROWS)
        self._tokens = [self.placeholder_id, *[self.image_token_id] * num_rows, tokenizer.eoi_token_id]

    def __call__(self, *, images: Sequence[Any], return_tensors: str, **_: Any) -> dict[str, Any]:
        """Return the tokens and pixels of one image."""
        import torch  # noqa: PLC0415 (an ingress without images does not need it)

        read = self.image_processor(images=list(images), return_tensors=return_tensors)
        return {"pixel_values": read["pixel_values"], "input_ids": torch.tensor([self._tokens])}
