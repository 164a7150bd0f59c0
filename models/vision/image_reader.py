"""From an encoded image to what a model takes: its tokens, and its pixels. Through Pillow, and the checkpoint's own processor.

Both sides of the cluster use it: an ingress for the tokens, and the instance that computes the prompt for the pixels."""

from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any

from PIL import Image, ImageOps

from core.errors import ConfigError, UnsupportedModel
from models.spec.model_spec import read_json
from models.vision import gemma3_images, pixtral_processor
from models.vision.without_videos import processor_without_videos

FORMATS = ("PNG", "JPEG", "WEBP", "GIF")
MOST_STRETCHED = 32
"""How many times longer one side may be than the other: processors make the shorter one as long as a tower needs it."""


LOW_DETAIL_PIXELS = 512
"""The most of a side of an image at low detail, as OpenAI has it."""
FEWEST_ROWS = 2
"""transformers' projector of Mistral 3 fails with a single one."""


class UnreadableImage(ValueError):
    """Says why, as the end of a sentence."""


@dataclass(frozen=True, slots=True)
class ImageLayout:
    tokens: list[int]
    """The prompt's tokens for the image, those that stand for its rows and those between them."""
    columns: int
    both_ways: bool = False
    """Both as in `core.prompt_images.PromptImage`."""


def open_image(data: bytes, max_pixels: int = 0) -> Image.Image:
    """Return the image, upright and in RGB. Of several in one file, as in phones' photos and animations, it is the first.

    `max_pixels` is checked before any pixel is decoded; 0 means any number. Raises
    UnreadableImage."""
    try:
        image = Image.open(BytesIO(data), formats=FORMATS)
    except (Image.DecompressionBombError, Image.DecompressionBombWarning):
        raise UnreadableImage(f"it has more than {max_pixels} pixels") from None
    except Exception:  # Pillow's decoders raise what they like
        raise UnreadableImage(f"it is no {', '.join(FORMATS[:-1])} or {FORMATS[-1]} file") from None
    width, height = image.size
    if max_pixels and width * height > max_pixels:
        raise UnreadableImage(f"it has {width} x {height} pixels, more than {max_pixels}")
    if max(width, height) > MOST_STRETCHED * min(width, height):
        raise UnreadableImage(
            f"one of its sides ({width} x {height}) is more than {MOST_STRETCHED} times the other"
        )
    try:
        return ImageOps.exif_transpose(image).convert("RGB")
    except Exception as error:
        raise UnreadableImage(f"it is damaged: {error}") from None


def at_low_detail(image: Image.Image) -> tuple[bytes, Image.Image]:
    """Return the image with no side longer than LOW_DETAIL_PIXELS, as a PNG file and opened."""
    small = image.copy()
    small.thumbnail((LOW_DETAIL_PIXELS, LOW_DETAIL_PIXELS))
    out = BytesIO()
    small.save(out, "PNG", compress_level=1)
    return out.getvalue(), small


class ImageReader:
    def __init__(self, folder: Path, token_id: int) -> None:
        """`token_id` stands for one row of an image. Raises ConfigError and UnsupportedModel."""
        try:
            self._inner = _processor(folder)
        except (OSError, ValueError, ImportError) as error:
            raise ConfigError(
                f"cannot load the processor in {folder}: {str(error).splitlines()[0]}"
            ) from None
        self.token_id = token_id
        self.placeholder_id: int = getattr(self._inner, "placeholder_id", token_id)
        """What a chat template writes for an image."""
        if self._inner.image_token_id != token_id:
            raise UnsupportedModel(
                f"the processor in {folder} writes token {self._inner.image_token_id} for images; config.json says {token_id}"
            )

    def in_text(self, text: str) -> str:
        """Return a conversation's text with what this model has around each image beside its own tokens."""
        if not (around := getattr(self._inner, "around", "")):
            return text
        mark: str = self._inner.image_token
        return text.replace(mark, f"{around}{mark}{around}")

    def layout(self, image: Image.Image) -> ImageLayout:
        """Return how the image stands in a prompt. Raises UnreadableImage."""
        read = self._read(image)
        tokens = read["input_ids"][0].tolist()
        if tokens.count(self.token_id) < FEWEST_ROWS:
            raise UnreadableImage(f"it is too small for this model: {image.width} x {image.height} pixels")
        return ImageLayout(tokens, self._columns(read), getattr(self._inner, "both_ways", False))

    def _columns(self, read: Any) -> int:
        """Return `ImageLayout.columns`. Models that are told an image's grid of patches give it positions in a plane."""
        if "image_grid_thw" not in read:
            return 0
        return int(read["image_grid_thw"][0][2]) // self._inner.image_processor.merge_size

    def pixels(self, data: bytes) -> dict[str, Any]:
        """Return the tensors that the model's `get_image_features` takes. Raises UnreadableImage."""
        return self.pixels_of(open_image(data))

    def pixels_of(self, image: Image.Image) -> dict[str, Any]:
        """Return the same of an image that is open."""
        read = self._read(image)
        return {name: read[name] for name in self._inner.image_processor.model_input_names if name in read}

    def _read(self, image: Image.Image) -> Any:
        try:
            return self._inner(
                text=[self._inner.image_token], images=[image], add_special_tokens=False, return_tensors="pt"
            )
        except (ValueError, TypeError, IndexError, ZeroDivisionError, RuntimeError) as error:
            raise UnreadableImage(f"this model's processor does not take it: {error}") from None


def _processor(folder: Path) -> Any:
    """Return what writes an image's tokens: transformers' own where it does not need torchvision for videos."""
    name = _name(folder)
    if name == pixtral_processor.NAME:
        return pixtral_processor.PixtralImages(folder)
    if name == gemma3_images.NAME:
        return gemma3_images.Gemma3Images(folder)
    if (found := processor_without_videos(folder, name)) is not None:
        return found
    from transformers import AutoProcessor  # noqa: PLC0415 (seconds, which models without images do not need)

    # torchvision's resizing rounds otherwise, so that images would differ by what is installed.
    return AutoProcessor.from_pretrained(folder, local_files_only=True, backend="pil")


def _name(folder: Path) -> str:
    """Return what transformers calls the processor. Older checkpoints say it beside the size of images."""
    paths = [folder / name for name in ("processor_config.json", "preprocessor_config.json")]
    said = (read_json(path).get("processor_class") for path in paths if path.exists())
    return next(filter(None, said), "")
