"""The section `pictures` of the configuration: what an ingress takes of images in requests."""

from typing import Annotated

from pydantic import Field

from core.config.config_section import Section

ImageHost = Annotated[
    str, Field(title="`*` or HOST[:PORT] name", pattern=r"^(\*|[A-Za-z0-9._-]+(:[0-9]{1,5})?)$")
]


class ImageConfig(Section):
    max_per_request: int = Field(default=8, ge=0, le=256)
    """Images of one request, over all of its messages; 0: none."""
    max_bytes: int = Field(default=4 << 20, ge=1)
    """Bytes of one image as it is encoded (PNG, JPEG, WebP or GIF). `serve.max_body_bytes` bounds all of them, in base64."""
    max_pixels: int = Field(default=1 << 24, ge=1)
    """Pixels of one image, width times height; a larger one is refused before it is decoded."""
    url_hosts: tuple[ImageHost, ...] = ()
    """Hosts from which an ingress fetches images that requests name by http(s) URL, such as images.example.com or minio:9000;
    `*`: every one with a public address. Empty: none, images come as data URLs."""
    url_timeout_s: float = Field(default=10.0, gt=0)
    """Seconds in which such an image must have come."""
