"""Reads the names of models that can be pulled: a hub's, a bucket's, or the URL of one GGUF file.

A name is written in one way in the cache, however it was given, and needs no network to be read."""

import hashlib
import re
from typing import Final, Literal, NamedTuple

Place = Literal["hub", "modelscope", "bucket", "url"]

_MODELSCOPE: Final = "modelscope://"
_PREFIXES: Final[dict[str, Place]] = {
    "hf.co/": "hub",
    "huggingface.co/": "hub",
    "hf://": "hub",
    _MODELSCOPE: "modelscope",
    "modelscope.cn/": "modelscope",
}
"""How Ollama's clients and other programs name a hub."""
BUCKETS: Final = ("s3://", "gs://", "az://")
_URLS: Final = ("http://", "https://")
_PART: Final = r"[A-Za-z0-9][A-Za-z0-9._-]{0,95}"
_OF_HUB: Final = re.compile(rf"({_PART}/{_PART})(?:@({_PART}(?:/{_PART})*))?")
_PATH: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._~%+=,:@/-]*")
_TAG: Final = ":latest"


class PulledName(NamedTuple):
    place: Place
    path: str
    """owner/name, or the whole URL."""
    revision: str = ""

    @property
    def text(self) -> str:
        at = f"@{self.revision}" if self.revision else ""
        return f"{_MODELSCOPE if self.place == 'modelscope' else ''}{self.path}{at}"

    @property
    def key(self) -> str:
        """The name of its files in the cache."""
        readable = re.sub(r"[^A-Za-z0-9._-]+", "-", self.text)[-80:].lstrip(".-")
        return f"{readable}-{hashlib.sha256(self.text.encode()).hexdigest()[:12]}"


def pulled_name(given: str) -> PulledName | None:
    """Return what a name stands for; None where nothing could be pulled by it."""
    if given.startswith((*BUCKETS, *_URLS)):
        return _of_url(given)
    prefix = next((each for each in _PREFIXES if given.startswith(each)), "")
    found = _OF_HUB.fullmatch(given.removeprefix(prefix).removesuffix(_TAG))
    if found is None or ".." in given:
        return None
    return PulledName(_PREFIXES.get(prefix, "hub"), found[1], found[2] or "")


def _of_url(given: str) -> PulledName | None:
    """A name or password, a query or a fragment in it would be kept in the cache, and shown: there is none."""
    scheme, _, path = given.partition("://")
    path = path.rstrip("/")
    if not _PATH.fullmatch(path) or "@" in path.partition("/")[0] or ".." in path or "//" in path:
        return None
    if f"{scheme}://" in BUCKETS:
        return PulledName("bucket", f"{scheme}://{path}")
    return PulledName("url", f"{scheme}://{path}") if path.endswith(".gguf") and "/" in path else None
