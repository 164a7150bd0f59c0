"""Files that are read over HTTP, from any offset on; and one that has no list but its own headers."""

import base64
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import PurePosixPath
from typing import Final

import httpx

from core.errors import ConfigError
from models.files.pulled_names import PulledName
from models.pulling.remote_files import Interrupted, Read, RemoteFile

_TIMEOUT: Final = httpx.Timeout(30.0)
_BUSY: Final = frozenset((408, 425, 429, 500, 502, 503, 504))
_SHA256: Final = re.compile(r"[0-9a-f]{64}")


def make_client(transport: httpx.BaseTransport | None = None) -> httpx.Client:
    """Return a client that gives no other host than the first an Authorization header. With `transport`, no proxy is used."""
    return httpx.Client(
        transport=transport,
        follow_redirects=True,
        max_redirects=5,
        timeout=_TIMEOUT,
        trust_env=transport is None,
    )


def http_reader(client: httpx.Client, url: str, headers: Mapping[str, str]) -> Read:
    """Return how a file is read. Where a server sends all of it although a part was asked for, the rest is left out."""

    def read(offset: int) -> Iterator[bytes]:
        asked = {**headers, "Accept-Encoding": "identity"}
        if offset:
            asked["Range"] = f"bytes={offset}-"
        try:
            with client.stream("GET", url, headers=asked) as answer:
                check_status(answer)
                skipped = offset if answer.status_code == 200 else 0
                for chunk in answer.iter_raw():
                    yield chunk[skipped:]
                    skipped = max(0, skipped - len(chunk))
        except httpx.TransportError as error:
            raise Interrupted(f"{_host(url)}: {error or type(error).__name__}") from None

    return read


def check_status(answer: httpx.Response) -> None:
    """Raise Interrupted where one may ask again, and ConfigError where not. Neither shows a URL that may have a signature."""
    if answer.is_success:
        return
    status, url = answer.status_code, answer.history[0].url if answer.history else answer.url
    if status in _BUSY:
        raise Interrupted(f"{url.host} answered with the status {status}")
    hint = ": a token may be missing, or may not read it" if status in (401, 403) else ""
    raise ConfigError(f"{url.copy_with(query=None)} cannot be read: status {status}{hint}")


def file_of_url(client: httpx.Client, name: PulledName, sha256: str) -> RemoteFile:
    """Return the one file that a URL names, with what its headers say of it. Raises Interrupted and ConfigError."""
    headers = _token_of_hub(name.path)
    try:
        with client.stream(
            "GET", name.path, headers={**headers, "Accept-Encoding": "identity"}
        ) as answer:  # HEAD is refused by signed URLs, to which some hosts redirect
            check_status(answer)
            answers = [answer, *answer.history]
            size = answer.headers.get("Content-Length", "")
            found = next(filter(None, map(_sha256_of, answers)), "")
            version = found or answer.headers.get("ETag") or answer.headers.get("Last-Modified") or ""
    except httpx.TransportError as error:
        raise Interrupted(f"{_host(name.path)}: {error or type(error).__name__}") from None
    if not size.isdigit():
        raise ConfigError(f"{name.text}: the server does not say how large the file is")
    return RemoteFile(
        path=PurePosixPath(name.path).name,
        num_bytes=int(size),
        version=f"{version} {size} {sha256}",
        sha256=sha256 or found,
        read=http_reader(client, name.path, headers),
    )


def _sha256_of(answer: httpx.Response) -> str:
    """Return the digest that an answer states: RFC 9530, or as Hugging Face and S3 do."""
    stated = answer.headers
    if found := re.search(r"\bsha-256=:?([A-Za-z0-9+/]{43}=)", stated.get("Repr-Digest", "")):
        return base64.b64decode(found[1]).hex()
    if checksum := stated.get("x-amz-checksum-sha256", ""):
        return base64.b64decode(checksum).hex() if len(checksum) == 44 else ""
    linked = stated.get("X-Linked-Etag", "").strip('"')
    return linked if _SHA256.fullmatch(linked) else ""


def hub_endpoint() -> str:
    """Return the address of the hub, or of the mirror that HF_ENDPOINT names."""
    return (os.environ.get("HF_ENDPOINT") or "https://huggingface.co").rstrip("/")


def _token_of_hub(url: str) -> dict[str, str]:
    """Return the header by which the hub knows a client, where the URL is of the hub."""
    if not url.startswith(f"{hub_endpoint()}/"):
        return {}
    from huggingface_hub.utils import get_token  # noqa: PLC0415 (half a second)

    token = get_token()
    return {"Authorization": f"Bearer {token}"} if token else {}


def _host(url: str) -> str:
    return httpx.URL(url).host
