"""Images of a request, from the data URLs that messages have to the tokens that stand for them. What cannot be served is
refused here: nothing larger than configured is decoded."""

import base64
import binascii
from collections.abc import Sequence
from dataclasses import dataclass

from cluster.ingress.requests.conversation import ChatMessage, MessageImage, top_field
from core.config.image_config import ImageConfig
from core.errors import RequestError
from core.prompt_images import PromptImage
from models.vision.image_reader import (
    LOW_DETAIL_PIXELS,
    ImageLayout,
    ImageReader,
    UnreadableImage,
    at_low_detail,
    open_image,
)

_BASE64 = ";base64"


@dataclass(frozen=True, slots=True)
class Seen:
    """A prompt in which each image has its tokens."""

    prompt: tuple[int, ...]
    images: tuple[PromptImage, ...]


class ImageIntake:
    def __init__(self, reader: ImageReader, limits: ImageConfig) -> None:
        self._reader, self._limits = reader, limits

    def in_text(self, text: str) -> str:
        """Return a conversation's text as it is tokenized: with what the model has around each image."""
        return self._reader.in_text(text)

    def take_in(self, messages: Sequence[ChatMessage], prompt: Sequence[int]) -> Seen:
        """Return the prompt with its images. `prompt` has one token for each of them, as the chat template writes it. Raises
        RequestError."""
        shown = checked_images(messages, self._limits)
        marks = {self._reader.placeholder_id, self._reader.token_id}
        places = [at for at, token in enumerate(prompt) if token in marks]
        if len(places) != len(shown):
            raise RequestError(
                f"the chat template makes {len(places)} placeholders of {len(shown)} images: a message has text that stands "
                "for an image, or an image where this model takes none",
                field=top_field(shown[0].place),
            )
        taken = [self._taken(image) for image in shown]
        return _spliced(prompt, places, taken, self._reader.token_id)

    def _taken(self, shown: MessageImage) -> tuple[bytes, ImageLayout]:
        """Return the image and how it stands in a prompt."""
        data = self._data(shown.place, shown.url)
        try:
            image = open_image(data, self._limits.max_pixels)
            if shown.is_small and max(image.size) > LOW_DETAIL_PIXELS:
                data, image = at_low_detail(image)
            return data, self._reader.layout(image)
        except UnreadableImage as error:
            raise refused(shown.place, f"the image cannot be read: {error}") from None

    def _data(self, where: str, url: str) -> bytes:
        head, comma, text = url.partition(",")
        if not head.lower().startswith("data:"):
            raise refused(
                where,
                "send the image itself, as data:image/png;base64,...: this server fetches none (pictures.url_hosts)"
                if not self._limits.url_hosts
                else "an image's URL begins with data:, http:// or https://",
            )
        if not comma or not head.lower().endswith(_BASE64):
            raise refused(where, "a data URL must be data:image/...;base64,...")
        try:
            data = base64.b64decode(text, validate=True)
        except (binascii.Error, ValueError):
            raise refused(where, "the data URL is no valid base64") from None
        if len(data) > (limit := self._limits.max_bytes):
            raise refused(
                where,
                f"the image has {len(data)} bytes, more than this server's limit of {limit} (pictures.max_bytes)",
            )
        return data


def checked_images(messages: Sequence[ChatMessage], limits: ImageConfig) -> list[MessageImage]:
    """Return the images in order. Raises RequestError where there are too many."""
    found = images_of(messages)
    if len(found) > limits.max_per_request:
        raise RequestError(
            f"{len(found)} images exceed this server's limit of {limits.max_per_request} (pictures.max_per_request)",
            field=top_field(found[0].place),
        )
    return found


def images_of(messages: Sequence[ChatMessage]) -> list[MessageImage]:
    """Return the images in order."""
    contents = (message.content for message in messages if message.has_images)
    return [part for content in contents for part in content if isinstance(part, MessageImage)]


def _spliced(
    prompt: Sequence[int], places: Sequence[int], taken: Sequence[tuple[bytes, ImageLayout]], token_id: int
) -> Seen:
    out: list[int] = []
    images: list[PromptImage] = []
    end = 0
    for at, (data, layout) in zip(places, taken, strict=True):
        out += prompt[end:at]
        runs = _runs(layout.tokens, token_id, len(out))
        images.append(PromptImage(data, runs, layout.columns, layout.both_ways))
        out += layout.tokens
        end = at + 1
    out += prompt[end:]
    return Seen(tuple(out), tuple(images))


def _runs(tokens: Sequence[int], token_id: int, first: int) -> tuple[tuple[int, int], ...]:
    """Return (first, count) of each run of `token_id`, counted from `first`."""
    runs: list[tuple[int, int]] = []
    for at, token in enumerate(tokens, first):
        if token != token_id:
            continue
        if runs and sum(runs[-1]) == at:
            runs[-1] = runs[-1][0], runs[-1][1] + 1
        else:
            runs.append((at, 1))
    return tuple(runs)


def refused(where: str, why: str) -> RequestError:
    return RequestError(f"{where}: {why}", field=top_field(where))
