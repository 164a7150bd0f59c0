"""What clients send: bytes of HTTP, forms, bodies."""

import asyncio
import atexit
import copy
import json
import re
import tempfile
from functools import cache
from pathlib import Path
from typing import Any, cast

import httpx
import uvicorn
from uvicorn.server import ServerState

from cluster.ingress.batches.upload_form import UploadForm
from cluster.ingress.http.connection_limits import ConnectionLimits
from cluster.ingress.http.http_connection import Connection
from cluster.ingress.http.request_json import parse_json
from core.errors import RequestError
from tests.cluster.ingress.api.fakes import FakeGenerator
from tests.cluster.ingress.api.harness import Api, message_of
from tests.cluster.ingress.api.mutations import (
    BODIES,
    VALUES,
    encoded,
    paths,
    replaced,
    valid_bodies,
    without,
)
from tests.cluster.ingress.bodies.test_mutated_bodies import client
from tests.fuzz.choices import Choices, split

_STATUS = re.compile(rb"HTTP/1\.1 (\d{3}) ")
_LIMITS = ConnectionLimits()
_ROUTES = tuple(BODIES)
_MAX_EDITS = 12
_ANSWER_S = 20.0


@cache
def loop() -> asyncio.Runner:
    runner = asyncio.Runner()
    atexit.register(runner.close)
    return runner


class _Wire(asyncio.Transport):
    """The server's end of a connection whose client takes whatever it gets."""

    def __init__(self) -> None:
        super().__init__()
        self.sent = bytearray()
        self.protocol: Connection | None = None
        self._closing = False

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.sent += data

    def is_closing(self) -> bool:
        return self._closing

    def close(self) -> None:
        if not self._closing:
            self._closing = True
            asyncio.get_running_loop().call_soon(cast(Connection, self.protocol).connection_lost, None)

    abort = close

    def get_write_buffer_size(self) -> int:
        return 0

    def pause_reading(self) -> None: ...
    def resume_reading(self) -> None: ...

    def set_protocol(self, protocol: asyncio.BaseProtocol) -> None:
        raise AssertionError("nothing is served but HTTP/1.1")


@cache
def _served() -> uvicorn.Config:
    config = uvicorn.Config(
        Api(FakeGenerator("x")).app, log_config=None, lifespan="off", access_log=False, ws="none"
    )
    config.load()
    return config


async def _converse(pieces: list[bytes]) -> bytes:
    state = ServerState()
    connection, wire = Connection(_served(), state, {}, _LIMITS), _Wire()
    wire.protocol = connection
    connection.connection_made(wire)
    for piece in pieces:
        if wire.is_closing():
            break
        connection.data_received(piece)
        await asyncio.sleep(0)
    connection.eof_received()
    if not wire.is_closing():
        wire.close()
    async with asyncio.timeout(_ANSWER_S):
        while state.tasks:
            await asyncio.wait([*state.tasks])
    return bytes(wire.sent)


def fuzz_http(data: bytes) -> None:
    """A connection gets any bytes: it answers nothing with a 5xx, and nothing of it is left."""
    choices = Choices(data)
    cuts = choices.piece(8)
    sent = loop().run(_converse(split(choices.rest(), cuts)))
    statuses = [int(status) for status in _STATUS.findall(sent)]
    assert all(status < 500 for status in statuses), sent


def fuzz_json(data: bytes) -> None:
    """A body is a JSON object as Python's own parser reads it, or it is refused."""
    try:
        parsed = parse_json(data)
    except RequestError:
        return
    assert parsed == json.loads(data)
    json.dumps(parsed, ensure_ascii=False, allow_nan=False).encode()


@cache
def folder() -> Path:
    """Return a folder that is gone when this process ends."""
    made = tempfile.TemporaryDirectory(prefix="baton-fuzz-")
    atexit.register(made.cleanup)
    return Path(made.name)


@cache
def _client(route: str) -> httpx.AsyncClient:
    return client(route)


def _value(choices: Choices, route: str) -> Any:
    """Return something that may stand in a body."""
    match choices.below(5):
        case 0:
            return choices.piece(24).decode(errors="replace")
        case 1:
            return int.from_bytes(choices.piece(9), signed=True)
        case 2:
            found: Any = choices.pick(valid_bodies(route))
            for _ in range(choices.below(6)):
                inner = list(
                    found.values() if isinstance(found, dict) else found if isinstance(found, list) else ()
                )
                found = choices.pick(inner) if inner else found
            return copy.deepcopy(found)
        case 3:
            return [_value(choices, route) for _ in range(choices.below(4))]
        case _:
            return choices.pick(VALUES)


def _edited(choices: Choices, route: str) -> dict[str, Any]:
    body = choices.pick(valid_bodies(route))
    for _ in range(_MAX_EDITS):
        places = list(paths(body))
        if not choices.num_left or not places:
            break
        place = choices.pick(places)
        body = (
            without(body, place) if choices.below(4) == 0 else replaced(body, place, _value(choices, route))
        )
    return body


async def _answered(route: str, body: bytes) -> None:
    answer = await _client(route).post(route, content=body, headers={"content-type": "application/json"})
    assert answer.status_code < 500, (route, body, answer.text)
    if answer.status_code >= 400:
        assert message_of(answer.json()["error"]), (route, body)
    else:
        assert '"internal"' not in answer.text, (route, body, answer.text)


def fuzz_bodies(data: bytes) -> None:
    """A valid body of any route with any places of it changed is answered, or refused with a reason."""
    choices = Choices(data)
    route = choices.pick(_ROUTES)
    body = choices.rest() if choices.below(8) == 7 else encoded(_edited(choices, route))
    loop().run(_answered(route, body))


def fuzz_upload(data: bytes) -> None:
    """A form is read alike however it is cut, or it is refused."""
    choices = Choices(data)
    cuts, kind = choices.piece(4), choices.piece(48).decode("latin-1")
    body = choices.rest()
    whole, parts = _upload(kind, [body]), _upload(kind, split(body, cuts))
    assert whole == parts, (whole, parts)


def _upload(kind: str, pieces: list[bytes]) -> object:
    written: list[bytes] = []
    try:
        form = UploadForm(kind, written.append)
        for piece in pieces:
            form.feed(piece)
        form.end()
    except RequestError:
        return "refused"
    return form.fields, form.filename, b"".join(written)
