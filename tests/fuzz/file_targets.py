"""Files that clients or operators bring: images, batches, API keys."""

import json
from pathlib import Path

from pydantic import SecretStr

from cluster.ingress.batches.batch_lines import InputReader, body_of
from cluster.ingress.tenants.api_keys import key_of, read_keys
from core.errors import ConfigError
from models.vision.image_reader import UnreadableImage, at_low_detail, open_image
from tests.fuzz.http_targets import folder

_MAX_PIXELS, _PIECE_BYTES = 1 << 16, 61


def _written(name: str, data: bytes) -> Path:
    path = folder() / name
    path.write_bytes(data)
    return path


def fuzz_images(data: bytes) -> None:
    """An image is opened, or it is refused; nothing larger than allowed is decoded."""
    try:
        image = open_image(data, _MAX_PIXELS)
    except UnreadableImage:
        return
    assert image.mode == "RGB"
    assert image.width * image.height <= _MAX_PIXELS
    small, _ = at_low_detail(image)
    open_image(small)


def fuzz_batch_lines(data: bytes) -> None:
    """Each line of a batch is a request, or is named as what is wrong."""
    reader, in_pieces = InputReader("/v1/completions"), InputReader("/v1/completions")
    reader.feed(data)
    for at in range(0, len(data), _PIECE_BYTES):
        in_pieces.feed(data[at : at + _PIECE_BYTES])
    for each in (reader, in_pieces):
        each.end()
    assert (reader.lines, reader.errors) == (in_pieces.lines, in_pieces.errors)
    for line in reader.lines:
        assert isinstance(body_of(data[line.offset : line.offset + line.size]), dict)
    json.dumps(reader.errors).encode()
    assert reader.lines or reader.errors


def fuzz_api_keys(data: bytes) -> None:
    """A file of keys is read, or refused without a word of what is in it."""
    path = _written("keys", data)
    for where in ("serve.api_keys_file", "tenants.a.keys_file"):
        try:
            keys = read_keys(where, [], str(path))
        except ConfigError:
            continue
        for key in keys:
            assert key_of(SecretStr(key.get_secret_value()), of_tenant=where.startswith("tenants."))
