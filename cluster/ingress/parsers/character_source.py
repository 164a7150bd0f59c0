"""Reads a call that may turn out to be none: then its text is shown as it stood."""

import json
from collections.abc import Callable

from cluster.ingress.parsers.json_text import JsonText, Malformed
from cluster.ingress.parsers.markup_parser import EndOfText, EventWriter, Sink, Steps

MAX_NAME = 256
"""The most characters that a call's name, and the markup around it, may have."""
FENCE = "```"
_MAX_LANGUAGE = 24
"""The longest name of a language behind a fence."""


class CharacterSource:
    """Reads characters and remembers all of them: text that turns out to be no call is shown as it stood."""

    def __init__(self, mark: str = "") -> None:
        """`mark` is what calls begin with. A string with it in it that does not end well is no string."""
        self._mark = mark
        self._seen: list[str] = []
        self._num_settled = 0
        self._again: list[str] = []
        """Characters to be read a second time, the last one first."""
        self._ended: EndOfText | None = None
        self.is_fenced = False
        """Whether the call stands in a block of code."""

    @property
    def seen(self) -> str:
        return "".join(self._seen)

    def read(self, breaks: frozenset[str] | None = None) -> Steps[str]:
        """Read a character, or a run of characters that are not in `breaks`."""
        if self._again:
            character = self._again.pop()
        elif self._ended is not None:
            raise self._ended
        else:
            try:
                character = yield breaks
            except EndOfText as ended:
                self._ended = ended
                raise
        self._seen.append(character)
        return character

    def unread(self, num_characters: int) -> None:
        """Have the last characters, read one by one, read again."""
        for _ in range(num_characters):
            self._again.append(self._seen.pop())

    def settle(self, but: int = 0) -> None:
        """What was read is part of a call, but for the last characters."""
        self._num_settled = len(self._seen) - but

    @property
    def unsettled(self) -> str:
        return "".join(self._seen[self._num_settled :])

    def last_of(self, mark: str, default: int) -> int:
        """Return how many characters from the last `mark` on are part of no call."""
        text = self.unsettled
        at = text.rfind(mark) if mark else -1
        return len(text) - at if at >= 0 else min(default, len(text))

    def left(self) -> str:
        """Return what was to be read a second time."""
        return "".join(reversed(self._again))

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

    def follows(self, text: str) -> Steps[bool]:
        """Return whether `text` follows. It is read where it does, and nothing is read where it does not. Where the text is cut
        within it, nobody can tell."""
        num_read = 0
        try:
            for expected in text:
                character = yield from self.read()
                num_read += 1
                if character != expected:
                    self.unread(num_read)
                    return False
        except EndOfText as ended:
            self.unread(num_read)
            if ended.cut:
                raise
            return False
        return True

    def past_fence(self, first: str) -> Steps[str]:
        """Return the first character behind the line that opens a block of code, where `first` begins one."""
        if first != FENCE[0]:
            return first
        if not (yield from self.follows(FENCE[1:])):
            raise Malformed
        yield from self.until("\n", _MAX_LANGUAGE)
        self.is_fenced = True
        return (yield from self.skip_space())

    def json_value(self, first: str, sink: Sink) -> Steps[str]:
        """Give `sink` the JSON value that begins with `first`. Returns the character behind it where that had to be read, else
        none. Raises Malformed for what cannot be mended."""
        value = JsonText(sink, (self._mark,) if self._mark else ())
        value.push(first)
        try:
            while not value.is_done:
                value.push((yield from self.read(value.breaks)))
        except EndOfText as ended:
            if ended.cut:
                value.cut()
            if ended.cut or not value.close():
                raise
        return value.rest

    def word(self, first: str) -> Steps[str]:
        """Read a short string. Raises Malformed for anything else."""
        if first not in ('"', "'"):
            raise Malformed
        parts: list[str] = []
        character = yield from self.read()
        while character != first:
            if character == "\\":
                character += yield from self.read()
            parts.append(character)
            if len(parts) > MAX_NAME or character == "\n":
                raise Malformed
            character = yield from self.read()
        text = "".join(parts)
        return decoded(
            f'"{text}"' if first == '"' else '"{}"'.format(text.replace("\\'", "'").replace('"', '\\"'))
        )


def call_or_text(
    writer: EventWriter, marker: str, call: Callable[[CharacterSource], Steps[None]], *, restart: str = ""
) -> Steps[CharacterSource | None]:
    """Run `call` behind `marker`. Returns what has read it; None where no call began there, so that what was read is text.

    What shows that the call is broken is read again, from the last `restart` on, with which another call may begin. No other
    character is: text full of marks would otherwise be read over and over."""
    source = CharacterSource(restart)
    num_before = writer.num_begun_calls
    try:
        yield from call(source)
    except Malformed:
        return _broken(writer, marker, source, num_before, source.last_of(restart, default=1))
    except EndOfText as ended:
        begun = writer.num_begun_calls > num_before
        num_again = 0 if begun and ended.cut else source.last_of(restart, default=0)
        if num_again:
            return _broken(writer, marker, source, num_before, num_again)
        if not begun:
            writer.text(marker + source.seen)
        raise
    writer.unread(source.left())
    writer.end_call()
    return source


def _broken(
    writer: EventWriter, marker: str, source: CharacterSource, num_before: int, num_again: int
) -> CharacterSource | None:
    """Show what is no part of a call, and have the last characters read again."""
    begun = writer.num_begun_calls > num_before
    text = source.unsettled if begun else source.seen
    text, again = text[: len(text) - num_again], text[len(text) - num_again :]
    writer.unread(again + source.left())
    if not begun:
        writer.text(marker + text)
        return None
    if writer.end_call():
        writer.text(text)
    return source


def decoded(text: str) -> str:
    """Return what a JSON string says. Raises Malformed."""
    try:
        found = str(json.loads(text, strict=False))
        found.encode()
    except ValueError:
        raise Malformed from None
    return found
