"""One client's connection: what everything outside of requests' bodies may cost in bytes and in time.

A connection is in one of four states:

    HEAD    a head, or a new connection's first byte, is awaited    bytes and seconds
    ANSWER  a request is read and answered                          the application bounds its body and its time
    REST    the answer is complete, its request is not              seconds; what comes is dropped
    IDLE    neither a request nor an answer                         seconds (uvicorn's timer)

In every state the bytes since the last byte of a body are bounded, so that nothing that the parser collects can grow, and so are
those between the bytes of one body. A request
that is sent while another one is answered is not parsed before that answer is complete."""

import asyncio
from collections.abc import Callable
from enum import Enum, auto
from typing import Any

from uvicorn.config import Config
from uvicorn.protocols.http.flow_control import HIGH_WATER_LIMIT, FlowControl
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.server import ServerState

from cluster.ingress.http.connection_limits import (
    MAX_BYTES_BETWEEN,
    MAX_HEADERS,
    MAX_OUTSIDE_BYTES,
    MIN_SENT_BYTES,
    ConnectionLimits,
)

_SLICE_BYTES = 4096
"""The parser gets no more at once, so that it makes few requests of it."""


class ConnectionState(Enum):
    HEAD = auto()
    ANSWER = auto()
    REST = auto()
    IDLE = auto()


class _Parsing(Enum):
    NOTHING = auto()
    HEAD = auto()
    BODY = auto()


class Connection(HttpToolsProtocol):
    """uvicorn's connection, which would wait and collect for ever, with bounds. `check` must be called now and then."""

    def __init__(
        self, config: Config, server_state: ServerState, app_state: dict[str, Any], limits: ConnectionLimits
    ) -> None:
        super().__init__(config, server_state, app_state)
        self._limits = limits
        self._parsing = _Parsing.HEAD
        self.is_made = False
        self._held = b""
        """What has come and is not parsed yet."""
        self._num_outside = self._num_between = 0
        """Bytes since the last byte of a body, and those of the current message without its body, less what that allows."""
        self._state, self._since = ConnectionState.HEAD, self.loop.time()
        self._unsent: tuple[float, int] | None = None
        """Since when, and how many bytes then, an answer waits for its client to take it."""
        self.on_lost: Callable[[], None] = lambda: None

    @property
    def may_go(self) -> bool:
        """Whether the connection does nothing that its client would have to do again."""
        return self._state is not ConnectionState.ANSWER or self.flow.write_paused

    def check(self, now: float) -> None:
        """End the connection where it takes too long."""
        if self._is_stalled(now):
            self.transport.abort()
        elif not self.transport.is_closing():
            longest_s = {
                ConnectionState.HEAD: self._limits.head_s,
                ConnectionState.REST: self._limits.rest_s,
            }.get(self._state)
            if longest_s is not None and now - self._since > longest_s:
                self.transport.close()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.flow, self.is_made = _Flow(transport), True
        self._since = self.loop.time()

    def connection_lost(self, exc: Exception | None) -> None:
        self.on_lost()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._parsing is _Parsing.NOTHING and not self._held:
            data = data.lstrip(
                b"\r\n"
            )  # a parser passes over it, too, but it would count as the next request
        if data:
            self._held += data
            self._parse_held()

    def resume_writing(self) -> None:
        self._unsent = None
        super().resume_writing()

    def on_message_begin(self) -> None:
        self._parsing = _Parsing.HEAD
        super().on_message_begin()

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._parsing is _Parsing.BODY:
            return  # a trailer: nobody asks for it, and it must not pass for a header
        if len(self.headers) >= MAX_HEADERS:
            raise ValueError(f"more than {MAX_HEADERS} header lines")
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._parsing, self._num_outside, self._num_between = _Parsing.BODY, 0, 0
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._num_outside = 0
        self._num_between -= len(body) * (1 + MAX_BYTES_BETWEEN)
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._parsing, self._num_outside, self._num_between = _Parsing.NOTHING, 0, 0
        super().on_message_complete()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._note_state()
        if self._held:
            self.loop.call_soon(self._parse_held)

    def _unsupported_upgrade_warning(self) -> None:
        """Say nothing: the request is answered like any other, and whoever likes may ask for an upgrade."""

    def _parse_held(self) -> None:
        """Parse what has come, up to a request that has to wait for an answer."""
        if self.transport.is_closing():
            self._held = b""
            return
        left, self._held = memoryview(self._held), b""
        while left and not self.transport.is_closing():
            if self._must_wait:
                self._held = bytes(left)
                break
            piece, left = bytes(left[:_SLICE_BYTES]), left[_SLICE_BYTES:]
            if self._parsing is _Parsing.NOTHING:
                self._parsing = _Parsing.HEAD
            self._num_outside += len(piece)
            self._num_between += len(piece)
            super().data_received(piece)
            if max(self._num_outside, self._num_between) > MAX_OUTSIDE_BYTES:
                self.transport.close()
        self._note_state()
        self._hold_reading(on=bool(self._held))

    def _hold_reading(self, *, on: bool) -> None:
        assert isinstance(self.flow, _Flow)
        was_on, self.flow.held = self.flow.held, on
        if on:
            self.flow.pause_reading()
        elif was_on and not self.transport.is_closing():
            self.flow.resume_reading()

    @property
    def _is_answering(self) -> bool:
        return bool(self.cycle) and not self.cycle.response_complete

    @property
    def _must_wait(self) -> bool:
        if not self._is_answering:
            return False
        return self._parsing is not _Parsing.BODY or bool(
            self.pipeline and len(self.cycle.body) > HIGH_WATER_LIMIT
        )

    def _note_state(self) -> None:
        if self._is_answering or self.pipeline:
            state = ConnectionState.ANSWER
        elif self._parsing is _Parsing.BODY:
            state = ConnectionState.REST
        else:
            state = ConnectionState.HEAD if self._parsing is _Parsing.HEAD else ConnectionState.IDLE
        if state is not self._state:
            self._state, self._since = state, self.loop.time()

    def _is_stalled(self, now: float) -> bool:
        """Return whether an answer waits, nothing is added to it, and the client has taken too little of it for too long."""
        size = self.transport.get_write_buffer_size()
        if not size or not (self.flow.write_paused or self._state is not ConnectionState.ANSWER):
            self._unsent = None
            return False
        since, size_then = self._unsent = self._unsent or (now, size)
        if now - since < self._limits.send_s:
            return False
        self._unsent = None
        return size_then - size < MIN_SENT_BYTES


class _Flow(FlowControl):
    """Reads nothing while requests are held back, whoever asks for more."""

    held = False

    def resume_reading(self) -> None:
        if not self.held:
            super().resume_reading()
