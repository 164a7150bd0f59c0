"""How an answer leaves: as one JSON body, or as a stream of events. A client that disconnects ends the generation at once.

A stream that has nothing to say for a while sends a sign of life, which clients pass over, so that no balancer between takes the
connection for idle (ADR 111)."""

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from math import inf
from typing import Any

from fastapi import Request as HttpRequest
from fastapi.responses import JSONResponse, StreamingResponse
from starlette.types import Send

from cluster.ingress.generation.body_shape import BodyShape, Json
from cluster.ingress.generation.choices import ChoiceStream, TextPiece, UsageCounter
from cluster.ingress.generation.event_numbers import EventNumbers
from cluster.ingress.http.http_errors import describe

log = logging.getLogger(__name__)

Settle = Callable[[], Awaitable[object]]
"""Waits for what must be so before a client learns that its answer has ended."""


@dataclass(frozen=True, slots=True)
class StreamForm:
    media_type: str
    sign_of_life: str
    """What a stream sends instead of silence. Clients pass over it."""


SERVER_SENT_EVENTS = StreamForm("text/event-stream", ": keep-alive\n\n")
NOTHING_MORE = ": the client has every event of this stream\n\n"
JSON_LINES = StreamForm("application/x-ndjson", " ")


class ClientGone(Exception):
    pass


async def at_once_settled() -> None:
    """Wait for nothing."""


async def whole(
    http: HttpRequest,
    stream: AsyncGenerator[TextPiece, None],
    choices: Sequence[ChoiceStream],
    num_prompts: int,
    shape: BodyShape,
) -> JSONResponse:
    """Return the whole answer. Raises ClientGone when no client waits for it any more."""
    return JSONResponse(await unless_gone(http, gathered(stream, choices, num_prompts, shape)))


async def gathered(
    stream: AsyncGenerator[TextPiece, None],
    choices: Sequence[ChoiceStream],
    num_prompts: int,
    shape: BodyShape,
) -> Json:
    pieces: list[list[TextPiece]] = [[] for _ in choices]
    used = UsageCounter(choices, num_prompts)
    async with contextlib.aclosing(stream):
        async for piece in stream:
            pieces[piece.index].append(piece)
            used.count(piece)
    return shape.body(pieces, used.usage)


async def unless_gone(http: HttpRequest, work: Awaitable[Any]) -> Any:
    async def gone() -> None:
        while (await http.receive())["type"] != "http.disconnect":
            pass

    working, leaving = asyncio.ensure_future(work), asyncio.ensure_future(gone())
    try:
        await asyncio.wait([working, leaving], return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientGone
        return working.result()
    finally:
        await _ended(working, leaving)


async def _ended(*tasks: "asyncio.Future[Any] | None") -> None:
    """Cancel what is not done, and wait for its end."""
    left = [task for task in tasks if task is not None]
    for task in left:
        task.cancel()
    await asyncio.gather(*left, return_exceptions=True)


async def events(
    stream: AsyncGenerator[TextPiece, None],
    choices: Sequence[ChoiceStream],
    num_prompts: int,
    shape: BodyShape,
    request_id: str,
    begun: asyncio.Event,
    *,
    numbers: EventNumbers,
    settle: Settle,
) -> AsyncGenerator[str, None]:
    """Yield events up to the answer's last, but those that the client has. An error after the first of them, or once the stream
    has `begun` with a sign of life, is an event of its own. Once `shape` has the end, `settle` is awaited before the client gets
    it."""
    used = UsageCounter(choices, num_prompts)
    opened: set[int] = set()
    try:
        async with contextlib.aclosing(numbers.in_order(stream)) as pieces:
            async for piece in pieces:
                used.count(piece)
                opening = () if piece.index in opened else shape.opening(piece)
                opened.add(piece.index)
                for chunk in (*opening, *shape.chunks(piece)):
                    if event := numbers.numbered(piece.index, shape.frame(chunk)):
                        yield event
    except Exception as error:
        if not opened and not begun.is_set():
            raise
        last = [_error_event(error, shape, request_id)]
    else:
        last = shape.closing(used.usage)
    await settle()
    for chunk in last:
        if event := numbers.numbered(0, shape.frame(chunk)):
            yield event
    if numbers.has_all:
        yield NOTHING_MORE


def _error_event(error: Exception, shape: BodyShape, request_id: str) -> str:
    status, body, _ = describe(error, request_id)
    level = logging.ERROR if status == 500 else logging.WARNING
    log.log(level, "request %s ended in its stream: %r", request_id, error)
    return shape.error(status, body, request_id)


class EventResponse(StreamingResponse):
    """A stream of events whose source is closed the moment the client is gone."""

    def __init__(
        self,
        first: "asyncio.Future[str]",
        rest: AsyncGenerator[str, None],
        keep_alive_s: float,
        form: StreamForm = SERVER_SENT_EVENTS,
    ) -> None:
        """`first` is the event before `rest`. A sign of life is sent where `keep_alive_s` have passed without an event; 0:
        never."""
        super().__init__(
            rest,
            media_type=form.media_type,
            headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"},
        )
        self._sign_of_life = form.sign_of_life
        self._first, self._rest, self._keep_alive_s = first, rest, keep_alive_s
        self._sent_at = 0.0

    async def stream_response(self, send: Send) -> None:
        start = {"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers}
        clock = asyncio.get_running_loop().time
        beats: asyncio.Task[None] | None = None
        try:
            await send(start)
            self._sent_at = clock() if self._first.done() else -inf
            if self._keep_alive_s:
                beats = asyncio.create_task(self._beat(send))
            await send(_part(await self._first))
            self._sent_at = clock()
            async for event in self._rest:
                self._sent_at = clock()
                await send(_part(event))
        finally:
            await _ended(self._first, beats)
            await self._rest.aclose()
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _beat(self, send: Send) -> None:
        """Send a sign of life whenever nothing else has been sent for a while."""
        clock = asyncio.get_running_loop().time
        while True:
            left_s = self._sent_at + self._keep_alive_s - clock()
            if left_s <= 0:
                self._sent_at, left_s = clock(), self._keep_alive_s
                await send(_part(self._sign_of_life))
            await asyncio.sleep(left_s)


def _part(event: str) -> dict[str, Any]:
    return {"type": "http.response.body", "body": event.encode(), "more_body": True}


async def streamed(
    http: HttpRequest,
    source: AsyncGenerator[str, None],
    begun: asyncio.Event,
    keep_alive_s: float,
    form: StreamForm,
) -> EventResponse:
    """Return the response once the first event is there, so that a failure before it still gets a status of its own; or after
    `keep_alive_s`, in which case the stream has `begun` with a sign of life. 0: it waits for the event as long as that takes."""
    first = asyncio.ensure_future(anext(source))
    try:
        await unless_gone(http, asyncio.wait([first], timeout=keep_alive_s or None))
        if first.done():
            first.result()
    except BaseException:
        await _ended(first)
        await source.aclose()
        raise
    begun.set()
    return EventResponse(first, source, keep_alive_s, form)
