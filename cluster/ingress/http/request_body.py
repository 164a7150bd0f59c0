"""Reads the bytes of a request's JSON, no more and no slower than allowed."""

import asyncio

from fastapi import Request as HttpRequest

from cluster.ingress.http.body_room import BodyRoom
from core.errors import RequestError

ROOM = BodyRoom()
_JSON, _OF_CURL = "application/json", "application/x-www-form-urlencoded"
"""The type of JSON, and the one that `curl -d` states whatever it sends. A web page may send the latter to any host without a
preflight; browsers then add an Origin header."""


async def read_json(http: HttpRequest, max_bytes: int, timeout_s: float) -> bytes:
    """Return the body, and set `http.state.num_bytes`. Raises RequestError."""
    kind = http.headers.get("content-type", _JSON).partition(";")[0].strip().lower()
    if kind != _JSON and (kind != _OF_CURL or "origin" in http.headers):
        raise RequestError(f"content-type must be {_JSON}, not {kind!r}", status=415)
    encoding = http.headers.get("content-encoding", "identity").lower()
    if encoding != "identity":
        raise RequestError(f"content-encoding {encoding!r} is not taken: send the JSON itself", status=415)
    try:
        async with asyncio.timeout(timeout_s):
            data = await _read(http, max_bytes)
    except TimeoutError:
        raise RequestError(f"the body did not come within {timeout_s:g} s", status=408) from None
    http.state.num_bytes = len(data)
    return data


async def _read(http: HttpRequest, max_bytes: int) -> bytes:
    announced = http.headers.get("content-length", "")
    data = bytearray()
    if announced.isdigit() and int(announced[:20]) > max_bytes:
        raise RequestError(f"the body exceeds {max_bytes} bytes", status=413)
    with ROOM.coming(http.state.tenant.name) as room:
        async for piece in http.stream():
            room.add(len(piece))
            data += piece
            if len(data) > max_bytes:
                raise RequestError(f"the body exceeds {max_bytes} bytes", status=413)
        return bytes(data)
