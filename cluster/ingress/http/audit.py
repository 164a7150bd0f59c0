"""Logs one line for each request that was refused: who, what and why. It has no key, and nothing of what the client sent but its
address and the id that it gave the request."""

import logging

from fastapi import Request as HttpRequest

log = logging.getLogger(__name__)


def refused(http: HttpRequest, tenant: str, status: int, code: str, field: str | None) -> None:
    client = http.client.host if http.client else "unknown"
    log.warning(
        "refused request=%s client=%s tenant=%s %s %s status=%d code=%s field=%s",
        http.state.request_id,
        client,
        tenant or "-",
        http.method,
        _printable(http.scope["path"]),
        status,
        code,
        field or "-",
        extra={
            "audit": {
                "client": client,
                "tenant": tenant,
                "method": http.method,
                "path": _printable(http.scope["path"]),
                "status": status,
                "code": code,
                "field": field,
            }
        },
    )


def _printable(path: str) -> str:
    """Return the path, cut and escaped, so that no client can write a line into the log."""
    return path[:200].encode("unicode_escape").decode("ascii")
