"""The processor of Pixtral and Mistral 3, whose class in transformers needs torchvision. The pixels are transformers' own: this
writes the tokens, a row of patches after the other, each ended by a token of its own."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from models.spec.model_spec import read_json

NAME = "PixtralProcessor"


class PixtralImages:
    """Does what `models.vision.image_reader.ImageReader` asks of a processor of transformers."""

    def __init__(self, folder: Path) -> None:
        """Raises ConfigError, OSError and ValueError."""
        from transformers import AutoImageProcessor, AutoTokenizer  # noqa: PLC0415 (seconds)

        said = read_json(folder / "processor_config.json")
        self._edge = int(said.get("patch_size", 16)) * int(said.get("spatial_merge_size", 1))
        self.image_processor: Any = AutoImageProcessor.from_pretrained(
            folder, local_files_only=True, backend="pil"
        )
        tokenizer: Any = AutoTokenizer.from_pretrained(folder, local_files_only=True)

        def token(key: str, usual: str) -> int:
            return tokenizer.convert_tokens_to_ids(said.get(key, usual))

        self.image_token: str = said.get("image_token", "[IMG]")
        self.image_token_id = token("image_token", "[IMG]")
        self._break, self._end = (
            token("image_break_token", "[IMG_BREAK]"),
            token("image_end_token", "[IMG_END]"),
        )

    def __call__(self, *, images: Sequence[Any], return_tensors: str, **_: Any) -> dict[str, Any]:
        """Return the tokens and pixels of one image."""
        import torch  # noqa: PLC0415 (an ingress without images does not need it)

        edge = {"height": self._edge, "width": self._edge}
        read = self.image_processor(images=list(images), patch_size=edge, return_tensors=return_tensors)
        height, width = (int(size) // self._edge for size in read["image_sizes"][0])
        tokens = ([self.image_token_id] * width + [self._break]) * height
        return {**read, "input_ids": torch.tensor([[*tokens[:-1], self._end]])}
