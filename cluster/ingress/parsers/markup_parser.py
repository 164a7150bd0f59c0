"""The machinery that parsers of markup share: a parser is a coroutine that gets one character after the other.

Invariant: the state depends on the characters alone, so that no split of the text can change the events."""

from collections import deque
from collections.abc import Callable, Generator, Sequence
from contextlib import suppress
from typing import Protocol, TypeVar

from cluster.ingress.parsers.output_events import (
    CallArguments,
    CallBegins,
    CallEnds,
    OutputEvent,
    Reasoning,
    Text,
)
from cluster.ingress.parsers.stop_strings import StopStrings

T = TypeVar("T")
Steps = Generator[frozenset[str] | None, str, T]
"""Takes a character through each `yield`. A `yield` of characters may also get a run of others, which it treats alike: that saves
most of the time for plain text. EndOfText is thrown in when no more come."""
Sink = Callable[[str], None]


_MAX_SPACE = 64
"""The most white space that may stand before a mark at the beginning."""


class EndOfText(Exception):
    """The sequence has ended. `cut`: at a limit, and not where the model wanted."""

    def __init__(self, *, cut: bool = False) -> None:
        super().__init__()
        self.cut = cut


class CallWriter(Protocol):
    """Takes a call: its name, its arguments piece by piece, and that all of them are there."""

    def begin_call(self, name: str) -> None: ...
    def arguments(self, text: str) -> None: ...
    def complete_arguments(self) -> None: ...


class EventWriter:
    """Collects the events that a parser's steps make.

    White space is dropped around reasoning and around calls: it belongs to the markup, and templates add it again. Stop strings
    act on text alone."""

    def __init__(self, stops: StopStrings, *, text_is_last: bool) -> None:
        """`text_is_last`: nothing follows a text, so the white space at its end is part of it."""
        self._stops, self._text_is_last = stops, text_is_last
        self._events: list[OutputEvent] = []
        self._piece: list[str] = []
        self._piece_of: type[Text] | type[Reasoning] | type[CallArguments] = Text
        self._unread: deque[str] = deque()
        self._space = ""
        self._drops_space = False
        self._last: type[Text] | type[Reasoning] | None = None
        self._open_call = self._has_arguments = False
        self.num_begun_calls = 0
        self.num_ended_calls = 0
        self.is_reasoning = False

    def text(self, text: str) -> None:
        self._write(Text, text)

    def reasoning(self, text: str) -> None:
        self._write(Reasoning, text)

    @property
    def is_stopped(self) -> bool:
        """Whether a stop string has ended the text."""
        return self._stops.found is not None

    def begin_call(self, name: str) -> None:
        self.end_call()
        self._end_text()
        self._forget_space()
        self._flush()
        self._events.append(CallBegins(self.num_begun_calls, name))
        self.num_begun_calls += 1
        self._open_call, self._has_arguments = True, False

    def arguments(self, text: str) -> None:
        self._add(CallArguments, self._stops.shown(text))

    def complete_arguments(self) -> None:
        """All arguments of the open call are there. A call that ends without this is not whole."""
        self._has_arguments = True

    def end_call(self) -> bool:
        """End the call, if one is open. Returns whether the last one is whole."""
        if self._open_call:
            self._flush()
            self._events.append(CallEnds(self.num_begun_calls - 1, is_whole=self._has_arguments))
            self._open_call, self.num_ended_calls = False, self.num_ended_calls + 1
        return self._has_arguments

    def unread(self, text: str) -> None:
        """Give these characters to the parser's next steps, before what comes."""
        self._unread.extendleft(reversed(text))

    def next_unread(self) -> str:
        return self._unread.popleft() if self._unread else ""

    def take(self) -> tuple[OutputEvent, ...]:
        self._flush()
        events, self._events = self._events, []
        return tuple(events)

    def finish(self) -> None:
        if self._last is Text:
            self._add(Text, self._stops.push(self._space))
        self._end_text()
        self.end_call()

    def _write(self, kind: type[Text] | type[Reasoning], text: str) -> None:
        if kind is not self._last and (self._last is not None or kind is Reasoning):
            self._end_text()
            self._forget_space()
        if self._drops_space:
            text = text.lstrip()
        if not text:
            return
        self._last, self._drops_space = kind, False
        body = text if kind is Text and self._text_is_last else text.rstrip()
        if not body:
            self._space += text
            return
        body, self._space = self._space + body, text[len(body) :]
        self._add(kind, self._stops.push(body) if kind is Text else self._stops.shown(body))

    def _end_text(self) -> None:
        """Write what a stop string could have begun with: something else follows."""
        self._add(Text, self._stops.flush())

    def _forget_space(self) -> None:
        self._space, self._drops_space, self._last = "", True, None

    def _add(self, kind: type[Text] | type[Reasoning] | type[CallArguments], text: str) -> None:
        if not text:
            return
        if kind is not self._piece_of:
            self._flush()
            self._piece_of = kind
        self._piece.append(text)

    def _flush(self) -> None:
        if text := "".join(self._piece):
            kind = self._piece_of
            event = Text(text) if kind is Text else Reasoning(text) if kind is Reasoning else None
            self._events.append(event or CallArguments(self.num_begun_calls - 1, text))
        self._piece.clear()


class MarkupParser:
    """An OutputParser of steps that write to an EventWriter. `max_calls` is None where there is no limit."""

    def __init__(
        self,
        steps: Callable[[EventWriter], Steps[None]],
        max_calls: int | None = None,
        stops: StopStrings | None = None,
        *,
        text_is_last: bool = False,
    ) -> None:
        self._max_calls = max_calls
        self._writer = EventWriter(stops or StopStrings(), text_is_last=text_is_last)
        self._steps = steps(self._writer)
        self._breaks = next(self._steps)

    @property
    def is_reasoning(self) -> bool:
        return self._writer.is_reasoning

    @property
    def is_complete(self) -> bool:
        return self._max_calls is not None and self._writer.num_ended_calls >= self._max_calls

    @property
    def _is_over(self) -> bool:
        return self.is_complete or self._writer.is_stopped

    def push(self, text: str) -> tuple[OutputEvent, ...]:
        at = 0
        while at < len(text):
            end, breaks = at + 1, self._breaks
            if breaks is not None and text[at] not in breaks:
                while end < len(text) and text[end] not in breaks:
                    end += 1
            self._send(text[at:end])
            at = end
        return self._writer.take()

    def finish(self, *, cut: bool = False) -> tuple[OutputEvent, ...]:
        with suppress(EndOfText):
            while not self._is_over:
                self._breaks = self._steps.throw(EndOfText(cut=cut))
                self._send(self._writer.next_unread())
        self._writer.finish()
        return self._writer.take()

    def _send(self, run: str) -> None:
        while run and not self._is_over:
            self._breaks = self._steps.send(run)
            run = self._writer.next_unread()


def copy_until(markers: Sequence[str], sink: Sink) -> Steps[str]:
    """Give `sink` what stands before the first marker, and return that marker. No marker may contain another."""
    held, breaks = "", frozenset(marker[0] for marker in markers)
    try:
        while True:
            run = yield None if held else breaks
            if not held and run[0] not in breaks:
                sink(run)
                continue
            held += run
            if held in markers:
                return held
            while held and not any(marker.startswith(held) for marker in markers):
                sink(held[0])
                held = held[1:]
    except EndOfText:
        sink(held)
        raise


def begins_with(writer: EventWriter, marker: str) -> Steps[bool]:
    """Take `marker`, and white space before it, off the text's beginning. The text stays as it is where it begins otherwise."""
    held = ""
    try:
        while True:
            held += yield None
            begun = held.lstrip()
            if begun == marker:
                return True
            if not marker.startswith(begun) or len(held) > _MAX_SPACE + len(marker):
                writer.unread(held)
                return False
    except EndOfText:
        writer.text(held)
        raise


def plain_text(writer: EventWriter) -> Steps[None]:
    yield from copy_until((), writer.text)
