"""Fetches the images that messages name by http(s) URLs, from the hosts that the configuration allows.

Invariant: a connection goes to an address that was checked, and no redirect is followed. So no client reaches through an ingress
what the operator has not named."""

import asyncio
import base64
import socket
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace

import httpx

from cluster.ingress.images.image_intake import checked_images, refused
from cluster.ingress.images.public_addresses import is_public
from cluster.ingress.requests.conversation import ChatMessage, MessageImage
from core.config.image_config import ImageConfig

Resolve = Callable[[str, int], Awaitable[Sequence[str]]]
"""(host, port) -> its addresses, the best first. Raises OSError."""
_PORTS = {"http": 80, "https": 443}
_ANY = "*"


async def resolved(host: str, port: int) -> list[str]:
    """Ask the system."""
    found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return [str(each[4][0]) for each in found]


class ImageFetcher:
    def __init__(self, limits: ImageConfig, resolve: Resolve = resolved) -> None:
        self._limits, self._resolve = limits, resolve
        self._hosts = frozenset(host.lower() for host in limits.url_hosts)
        self._tls = httpx.create_ssl_context()

    async def with_data(self, messages: Sequence[ChatMessage]) -> list[ChatMessage] | None:
        """Return the messages with each http(s) URL replaced by a data URL of what it names; None where there is none. Raises
        RequestError."""
        shown = checked_images(messages, self._limits)
        places = {image.url: image.place for image in shown if _is_remote(image.url)}
        if not places:
            return None
        try:
            async with asyncio.TaskGroup() as group:
                tasks = {url: group.create_task(self._in_time(where, url)) for url, where in places.items()}
        except ExceptionGroup as failed:
            raise failed.exceptions[0] from None
        data = {url: task.result() for url, task in tasks.items()}
        return [_replaced(message, data) for message in messages]

    async def _in_time(self, where: str, url: str) -> str:
        limit_s = self._limits.url_timeout_s
        try:
            async with asyncio.timeout(limit_s):
                return await self._fetched(where, url)
        except TimeoutError:
            raise refused(
                where, f"the image did not come within {limit_s:g} s (pictures.url_timeout_s)"
            ) from None

    async def _fetched(self, where: str, url: str) -> str:
        """Return a data URL of what `url` names."""
        try:
            parsed = httpx.URL(url)
        except httpx.InvalidURL:
            raise refused(where, "the URL cannot be read") from None
        failure = ""
        for address in await self._addresses(where, parsed):
            try:
                data = await self._got(where, parsed, address)
            except httpx.ConnectError as error:
                failure = str(error)
                continue
            except httpx.HTTPError as error:
                raise refused(where, f"the host did not answer: {type(error).__name__}") from None
            return f"data:image/*;base64,{base64.b64encode(data).decode()}"
        raise refused(where, f"the host cannot be reached: {failure}")

    async def _addresses(self, where: str, url: httpx.URL) -> Sequence[str]:
        """Return where to connect to. Raises RequestError where the URL may not be fetched."""
        if not url.host or url.userinfo:
            raise refused(where, "an image's URL has a host, and no name or password before it")
        host = url.raw_host.decode()
        is_named = (host if url.port is None else f"{host}:{url.port}") in self._hosts
        if not is_named and (_ANY not in self._hosts or url.port is not None):
            raise refused(
                where, f"this server fetches no images from {url.netloc.decode()!r} (pictures.url_hosts)"
            )
        try:
            addresses = await self._resolve(host, url.port or _PORTS[url.scheme])
        except (OSError, UnicodeError):
            addresses = []
        # The answer is the same for a name that nobody has and one of the inside: it tells nothing of who is there.
        if not addresses or not (is_named or all(map(is_public, addresses))):
            raise refused(where, f"the host {host!r} has no public address")
        return addresses

    async def _got(self, where: str, url: httpx.URL, address: str) -> bytes:
        limit = self._limits.max_bytes
        headers = {"Host": url.netloc.decode(), "Accept": "image/*", "Accept-Encoding": "identity"}
        extensions = {"sni_hostname": url.raw_host.decode()}
        async with (
            httpx.AsyncClient(verify=self._tls, trust_env=False, timeout=None) as client,
            client.stream(
                "GET", url.copy_with(host=address), headers=headers, extensions=extensions
            ) as answer,
        ):
            if answer.is_redirect:
                raise refused(where, "the URL leads to another one, which is not followed: send that one")
            if answer.status_code != 200:
                raise refused(where, f"the host answered with the status {answer.status_code}")
            data = bytearray()
            async for chunk in answer.aiter_raw():
                data += chunk
                if len(data) > limit:
                    raise refused(
                        where,
                        f"the image has more than this server's limit of {limit} bytes (pictures.max_bytes)",
                    )
        return bytes(data)


def _is_remote(url: str) -> bool:
    return url[:8].lower().startswith(("http://", "https://"))


def _replaced(message: ChatMessage, data: dict[str, str]) -> ChatMessage:
    if not message.has_images:
        return message
    parts = (
        replace(part, url=data.get(part.url, part.url)) if isinstance(part, MessageImage) else part
        for part in message.parts
    )
    return replace(message, content=tuple(parts))
