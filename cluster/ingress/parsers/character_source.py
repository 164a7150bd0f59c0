"""Reads a call that may turn out to be none: then its text is shown as it stood."""

import json
from collections.abc import Callable

from cluster.ingress.parsers.markup_parser import EndOfText, EventWriter, Sink, Steps

MAX_NAME = 256
"""The most characters that a call's name, and the markup around it, may have."""
_STRING_BREAKS = frozenset('"\\')


class Malformed(Exception):
    """The text is no call of the expected form."""


class CharacterSource:
    """Reads characters and remembers all of them: text that turns out to be no call is shown as it stood."""

    def __init__(self, begun: str = "") -> None:
        self._seen = [begun]

    @property
    def seen(self) -> str:
        return "".join(self._seen)

    def read(self, breaks: frozenset[str] | None = None) -> Steps[str]:
        """Read a character, or a run of characters that are not in `breaks`."""
        character = yield breaks
        self._seen.append(character)
        return character

    def skip_space(self) -> Steps[str]:
        """Return the first character that is no white space."""
        character = yield from self.read()
        while character.isspace():
            character = yield from self.read()
        return character

    def until(self, end: str, max_characters: int | None = None) -> Steps[str]:
        """Return what stands before `end`. Raises Malformed where that is longer than `max_characters`."""
        parts: list[str] = []
        tail = ""
        while tail != end:
            character = yield from self.read()
            parts.append(character)
            tail = (tail + character)[-len(end) :]
            if max_characters is not None and len(parts) > max_characters + len(end):
                raise Malformed
        return "".join(parts)[: -len(end)]

    def json_value(self, first: str, sink: Sink) -> Steps[str]:
        """Give `sink` the JSON value that begins with `first`. Returns the character behind a number or word, else none."""
        if first not in '{["':
            while first not in ",}] \t\r\n":
                sink(first)
                first = yield from self.read()
            return first
        sink(first)
        depth, in_string, escaped = int(first != '"'), first == '"', False
        while depth or in_string:
            character = yield from self.read(_STRING_BREAKS if in_string and not escaped else None)
            sink(character)
            if in_string:
                in_string = escaped or character != '"'
                escaped = not escaped and character == "\\"
            elif character == '"':
                in_string = True
            elif character in "{[":
                depth += 1
            elif character in "}]":
                depth -= 1
        return ""

    def string(self, first: str) -> Steps[str]:
        """Read a JSON string. Raises Malformed for anything else."""
        if first != '"':
            raise Malformed
        parts: list[str] = []
        yield from self.json_value(first, parts.append)
        return _decoded("".join(parts))


def call_or_text(
    writer: EventWriter, marker: str, call: Callable[[CharacterSource], Steps[None]]
) -> Steps[bool]:
    """Run `call` behind `marker`. Returns False where no call began there, so that what was read is text.

    Only the character that showed it is read again: text full of marks would otherwise be read over and over."""
    source = CharacterSource()
    num_before = writer.num_begun_calls
    try:
        yield from call(source)
    except Malformed:
        if writer.num_begun_calls == num_before:
            writer.text(marker + source.seen[:-1])
            writer.unread(source.seen[-1:])
            return False
    except EndOfText:
        if writer.num_begun_calls == num_before:
            writer.text(marker + source.seen)
        raise
    writer.end_call()
    return True


def to_json(value: object) -> str:
    """Return the value as JSON. Raises ValueError or TypeError for what JSON cannot say."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    text.encode()  # A lone surrogate is no text that can be sent.
    return text


def _decoded(text: str) -> str:
    try:
        decoded = str(json.loads(text, strict=False))
        decoded.encode()
    except ValueError:
        raise Malformed from None
    return decoded
