"""A way to the hosts of URLs that clients give: to addresses that everybody reaches, and to the usual ports."""

import socket
from typing import Final

import httpx

from cluster.ingress.images.public_addresses import is_public
from core.errors import ConfigError

_PORTS: Final = {"http": 80, "https": 443}


class PublicTransport(httpx.BaseTransport):
    """Invariant: a connection goes to an address that was checked, also after a redirect."""

    def __init__(self, inner: httpx.BaseTransport | None = None) -> None:
        self._inner = httpx.HTTPTransport(trust_env=False) if inner is None else inner

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        """Raises ConfigError where the host may not be reached, and httpx.TransportError."""
        url, failure = request.url, httpx.ConnectError("no address")
        host = url.raw_host.decode()
        extensions = {**request.extensions, "sni_hostname": host}
        for address in _addresses(url, host):
            to = httpx.Request(
                request.method,
                url.copy_with(host=address),
                headers=request.headers,
                stream=request.stream,
                extensions=extensions,
            )
            try:
                return self._inner.handle_request(to)
            except httpx.ConnectError as error:
                failure = error
        raise failure

    def close(self) -> None:
        self._inner.close()


def _addresses(url: httpx.URL, host: str) -> list[str]:
    """Return a host's addresses. Raises the same ConfigError for a private name as for an unknown one: clients must not learn
    which private names exist."""
    try:
        found = socket.getaddrinfo(host, _PORTS[url.scheme], type=socket.SOCK_STREAM)
    except (OSError, UnicodeError, KeyError):
        found = []
    addresses = list(dict.fromkeys(str(each[4][0]) for each in found))
    if url.port is not None or not addresses or not all(map(is_public, addresses)):
        raise ConfigError(f"{url.netloc.decode()!r} has no public address, or names a port")
    return addresses
