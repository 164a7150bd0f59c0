"""What clients' connections may cost an ingress before and around the requests that they carry."""

import resource
from dataclasses import dataclass

from core.config.serve_config import ServeConfig

MAX_OUTSIDE_BYTES = 64 << 10
"""The limit for bytes that belong to no body: a head, the extensions of one chunk, or trailers."""
MAX_BYTES_BETWEEN = 8
"""The bytes of chunks' heads that each byte of a body allows, beyond the limit above."""
MAX_HEADERS = 256
"""The limit for header lines of one request."""
MIN_SENT_BYTES = 256 << 10
"""What a client must take of a waiting answer within each `send_s`, unless it takes all of it."""
_SEND_S = 30.0
_OTHER_FILES = 256
"""File descriptors that an ingress needs for anything but clients' connections."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectionLimits:
    head_s: float = 20.0
    """For a TLS handshake, for a request line with headers, and for the first of them on a new connection."""
    rest_s: float = 20.0
    """For what is left of a request that has its answer already."""
    idle_s: float = 75.0
    """Between two requests."""
    send_s: float = _SEND_S
    """A client that takes too little of its answer for so long is cut off."""
    most: int = 4096
    """Connections at once."""
    most_per_address: int = 0
    """Connections of one address at once; 0: as many as there are."""


def connection_limits(config: ServeConfig) -> ConnectionLimits:
    """Return the limits of an ingress. It has no more connections than this process may have files open."""
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return ConnectionLimits(
        send_s=min(_SEND_S, config.request_timeout_s),
        most=max(1, min(config.max_connections, files - _OTHER_FILES)),
        most_per_address=config.max_connections_per_address,
    )
