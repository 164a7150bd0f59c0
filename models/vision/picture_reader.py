"""From an encoded picture to what a model takes: its tokens, and its pixels. Through Pillow, and the checkpoint's own processor.

Both sides of the cluster use it: an ingress for the tokens, and the instance that computes the prompt for the pixels."""

from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any

from PIL import Image, ImageOps

from core.errors import ConfigError, UnsupportedModel
from models.spec.model_spec import read_json
from models.vision import gemma3_pictures, pixtral_processor
from models.vision.without_videos import processor_without_videos

FORMATS = ("PNG", "JPEG", "WEBP", "GIF")
MOST_STRETCHED = 32
"""How many times longer one side may be than the other: processors make the shorter one as long as a tower needs it."""


LOW_DETAIL_PIXELS = 512
"""The most of a side of a picture at low detail, as OpenAI has it."""
FEWEST_ROWS = 2
"""transformers' projector of Mistral 3 fails with a single one."""


class UnreadablePicture(ValueError):
    """Says why, as the end of a sentence."""


@dataclass(frozen=True, slots=True)
class PictureLayout:
    tokens: list[int]
    """The prompt's tokens for the picture, those that stand for its rows and those between them."""
    columns: int
    both_ways: bool = False
    """Both as in `core.prompt_pictures.Picture`."""


def open_picture(data: bytes, max_pixels: int = 0) -> Image.Image:
    """Return the picture, upright and in RGB. Of several in one file, as in phones' photos and animations, it is the first.

    `max_pixels` is checked before any pixel is decoded; 0 means any number. Raises
    UnreadablePicture."""
    try:
        image = Image.open(BytesIO(data), formats=FORMATS)
    except (Image.DecompressionBombError, Image.DecompressionBombWarning):
        raise UnreadablePicture(f"it has more than {max_pixels} pixels") from None
    except Exception:  # Pillow's decoders raise what they like
        raise UnreadablePicture(f"it is no {', '.join(FORMATS[:-1])} or {FORMATS[-1]} file") from None
    width, height = image.size
    if max_pixels and width * height > max_pixels:
        raise UnreadablePicture(f"it has {width} x {height} pixels, more than {max_pixels}")
    if max(width, height) > MOST_STRETCHED * min(width, height):
        raise UnreadablePicture(
            f"one of its sides ({width} x {height}) is more than {MOST_STRETCHED} times the other"
        )
    try:
        return ImageOps.exif_transpose(image).convert("RGB")
    except Exception as error:
        raise UnreadablePicture(f"it is damaged: {error}") from None


def at_low_detail(image: Image.Image) -> tuple[bytes, Image.Image]:
    """Return the picture with no side longer than LOW_DETAIL_PIXELS, as a PNG file and opened."""
    small = image.copy()
    small.thumbnail((LOW_DETAIL_PIXELS, LOW_DETAIL_PIXELS))
    out = BytesIO()
    small.save(out, "PNG", compress_level=1)
    return out.getvalue(), small


class PictureReader:
    def __init__(self, folder: Path, token_id: int) -> None:
        """`token_id` stands for one row of a picture. Raises ConfigError and UnsupportedModel."""
        try:
            self._inner = _processor(folder)
        except (OSError, ValueError, ImportError) as error:
            raise ConfigError(
                f"cannot load the processor in {folder}: {str(error).splitlines()[0]}"
            ) from None
        self.token_id = token_id
        self.placeholder_id: int = getattr(self._inner, "placeholder_id", token_id)
        """What a chat template writes for a picture."""
        if self._inner.image_token_id != token_id:
            raise UnsupportedModel(
                f"the processor in {folder} writes token {self._inner.image_token_id} for pictures; config.json says {token_id}"
            )

    def in_text(self, text: str) -> str:
        """Return a conversation's text with what this model has around each picture beside its own tokens."""
        if not (around := getattr(self._inner, "around", "")):
            return text
        mark: str = self._inner.image_token
        return text.replace(mark, f"{around}{mark}{around}")

    def layout(self, image: Image.Image) -> PictureLayout:
        """Return how the picture stands in a prompt. Raises UnreadablePicture."""
        read = self._read(image)
        tokens = read["input_ids"][0].tolist()
        if tokens.count(self.token_id) < FEWEST_ROWS:
            raise UnreadablePicture(f"it is too small for this model: {image.width} x {image.height} pixels")
        return PictureLayout(tokens, self._columns(read), getattr(self._inner, "both_ways", False))

    def _columns(self, read: Any) -> int:
        """Return `PictureLayout.columns`. Models that are told a picture's grid of patches give it positions in a plane."""
        if "image_grid_thw" not in read:
            return 0
        return int(read["image_grid_thw"][0][2]) // self._inner.image_processor.merge_size

    def pixels(self, data: bytes) -> dict[str, Any]:
        """Return the tensors that the model's `get_image_features` takes. Raises UnreadablePicture."""
        return self.pixels_of(open_picture(data))

    def pixels_of(self, image: Image.Image) -> dict[str, Any]:
        """Return the same of a picture that is open."""
        read = self._read(image)
        return {name: read[name] for name in self._inner.image_processor.model_input_names if name in read}

    def _read(self, image: Image.Image) -> Any:
        try:
            return self._inner(
                text=[self._inner.image_token], images=[image], add_special_tokens=False, return_tensors="pt"
            )
        except (ValueError, TypeError, IndexError, ZeroDivisionError, RuntimeError) as error:
            raise UnreadablePicture(f"this model's processor does not take it: {error}") from None


def _processor(folder: Path) -> Any:
    """Return what writes a picture's tokens: transformers' own where it does not need torchvision for videos."""
    name = _name(folder)
    if name == pixtral_processor.NAME:
        return pixtral_processor.PixtralPictures(folder)
    if name == gemma3_pictures.NAME:
        return gemma3_pictures.Gemma3Pictures(folder)
    if (found := processor_without_videos(folder, name)) is not None:
        return found
    from transformers import AutoProcessor  # noqa: PLC0415 (seconds, which models without pictures do not need)

    # torchvision's resizing rounds otherwise, so that pictures would differ by what is installed.
    return AutoProcessor.from_pretrained(folder, local_files_only=True, backend="pil")


def _name(folder: Path) -> str:
    """Return what transformers calls the processor. Older checkpoints say it beside the size of pictures."""
    paths = [folder / name for name in ("processor_config.json", "preprocessor_config.json")]
    said = (read_json(path).get("processor_class") for path in paths if path.exists())
    return next(filter(None, said), "")
