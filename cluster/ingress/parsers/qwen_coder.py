"""Qwen3-Coder's XML: `<tool_call><function=f><parameter=a>value</parameter></function></tool_call>`.

Values are bare text: the tool's schema says what they are. Models leave tags out, and values may have tags in them; so a tag
counts where what follows it can follow it."""

import json

from cluster.ingress.parsers.argument_values import (
    Schema,
    Schemas,
    is_text,
    of_bare_text,
    properties_of,
    property_of,
    to_json,
)
from cluster.ingress.parsers.call_search import CallSearch, behind_call
from cluster.ingress.parsers.character_source import MAX_NAME, CharacterSource, call_or_text
from cluster.ingress.parsers.json_calls import arguments_value, known_name
from cluster.ingress.parsers.json_text import Malformed
from cluster.ingress.parsers.markup_parser import EndOfText, EventWriter, Sink, Steps

BEGIN, END = "<tool_call>", "</tool_call>"
FUNCTION, FUNCTION_END = "<function=", "</function>"
PARAMETER, PARAMETER_END = "<parameter=", "</parameter>"
_FOLLOWERS = {
    PARAMETER_END: (PARAMETER, FUNCTION_END, END, BEGIN, FUNCTION),
    FUNCTION_END: (END, BEGIN, FUNCTION),
    END: (BEGIN,),
}
"""What may follow a tag that ends a value, but for the text's end."""
_TAG_BEGIN = frozenset("<")


def qwen_coder_calls(writer: EventWriter, schemas: Schemas) -> Steps[None]:
    def tagged(source: CharacterSource) -> Steps[None]:
        yield from source.skip_space()
        source.unread(1)
        if not (yield from source.follows(FUNCTION)):
            raise Malformed
        yield from _Call(writer, source, schemas).read(known_only=False)

    def untagged(source: CharacterSource) -> Steps[None]:
        yield from _Call(writer, source, schemas).read(known_only=True)

    search = CallSearch(writer, (BEGIN, FUNCTION))
    behind = ""
    while True:
        mark = behind or (yield from search.next())
        found = yield from call_or_text(writer, mark, tagged if mark == BEGIN else untagged, restart=BEGIN)
        behind = "" if found is None else (yield from behind_call(writer, (END, BEGIN, FUNCTION)))
        behind = "" if behind == END else behind


class _Call:
    def __init__(self, writer: EventWriter, source: CharacterSource, schemas: Schemas) -> None:
        self._writer, self._source, self._schemas = writer, source, schemas
        self._tool: Schema = {}
        self._given: set[str] = set()

    def read(self, *, known_only: bool) -> Steps[None]:
        """Read a call whose `<function=` is read."""
        writer, source = self._writer, self._source
        name = known_name((yield from source.until(">", MAX_NAME)), self._schemas)
        if not name or BEGIN in name or (known_only and name not in self._schemas):
            raise Malformed
        writer.begin_call(name)
        source.settle()
        self._tool = self._schemas.get(name, {})
        try:
            if (yield from source.skip_space()) == "{":
                behind = yield from arguments_value(writer, source, "{", self._tool)
                source.unread(len(behind))
                yield from self._next_tag()
                return
            source.unread(1)
            tag = yield from self._next_tag()
            while tag == PARAMETER:
                key = (yield from source.until(">", MAX_NAME)).strip()
                tag = yield from self._parameter(key)
        except EndOfText as ended:
            if ended.cut:
                raise
        writer.arguments("}" if self._given else "{}")
        writer.complete_arguments()
        source.settle()

    def _next_tag(self) -> Steps[str]:
        """Return `<parameter=`, or nothing where the call ends. The end's tag is read where it is there."""
        source = self._source
        yield from source.skip_space()
        source.unread(1)
        if (yield from source.follows(PARAMETER)):
            return PARAMETER
        yield from source.follows(FUNCTION_END)
        return ""

    def _parameter(self, key: str) -> Steps[str]:
        """Read a parameter's value. Returns the next tag as `_next_tag` does."""
        schema = property_of(self._tool, key)
        self._writer.arguments(("{" if not self._given else ", ") + f"{to_json(key)}: ")
        self._given.add(key)
        value = _Value(self._writer.arguments, streams=is_text(schema))
        try:
            end = yield from self._value(value.add)
        except EndOfText as ended:
            if ended.cut:
                value.cut()
                raise
            end = ""
        if is_text(schema):
            value.end()
        else:
            self._writer.arguments(of_bare_text(value.text, schema, self._tool))
        self._source.settle()
        return (
            (yield from self._next_tag()) if end == PARAMETER_END else PARAMETER if end == PARAMETER else ""
        )

    def _value(self, sink: Sink) -> Steps[str]:
        """Give `sink` a value, and return the tag that ends it; nothing where another call follows."""
        source = self._source
        while True:
            run = yield from source.read(_TAG_BEGIN)
            if run != "<":
                sink(run)
                continue
            source.unread(1)
            tag = yield from self._end_of_value()
            if tag is not None:
                return tag
            sink((yield from source.read()))

    def _end_of_value(self) -> Steps[str | None]:
        """Return the tag that stands here and ends a value. It is read, unless it belongs to what follows the call."""
        source = self._source
        for tag, followers in _FOLLOWERS.items():
            if (yield from source.follows(tag)):
                if (yield from self._followed_by(tag, followers)):
                    if tag == END:
                        source.unread(len(tag))
                    return tag
                source.unread(len(tag))
                return None
        if (yield from self._begins_next()):
            yield from source.follows(PARAMETER)
            return PARAMETER
        return None

    def _followed_by(self, end: str, tags: tuple[str, ...]) -> Steps[bool]:
        """Return whether one of the tags, or the text's end, follows. Nothing is read."""
        source, space = self._source, ""
        try:
            while (character := (yield from source.read())).isspace():
                space += character
        except EndOfText:
            source.unread(len(space))
            return True
        source.unread(1)
        found = False
        for tag in tags if character == "<" else ():
            if (yield from source.follows(tag)):
                source.unread(len(tag))
                # A string may have tags in it. Those of a call stand on lines of their own, or side by side.
                found = tag != PARAMETER or not space or "\n" in space or (yield from self._begins_next())
                break
        source.unread(len(space))
        return found

    def _begins_next(self) -> Steps[bool]:
        """Return whether another parameter of the tool begins here. Nothing is read."""
        source = self._source
        if not (yield from source.follows(PARAMETER)):
            return False
        found = ""
        for key in properties_of(self._tool):
            if key not in self._given and (yield from source.follows(f"{key}>")):
                found = f"{key}>"
                break
        source.unread(len(PARAMETER + found))
        return bool(found)


class _Value:
    """A value without the newlines around it, since the template puts each value on lines of its own."""

    def __init__(self, sink: Sink, *, streams: bool) -> None:
        """With `streams` the value is a string, which goes out as it comes."""
        self._sink, self._streams = sink, streams
        self._parts: list[str] = []
        self._begun = False
        self._newline = ""

    @property
    def text(self) -> str:
        return "".join(self._parts)

    def add(self, text: str) -> None:
        if not self._begun:
            self._begun = True
            if self._streams:
                self._sink('"')
            text = text.removeprefix("\n")
        text = self._newline + text
        self._newline = "\n" if text.endswith("\n") else ""
        self._write(text.removesuffix("\n"))

    def end(self) -> None:
        self._sink('"' if self._begun else '""')

    def cut(self) -> None:
        if not self._streams:
            self._sink(self.text)

    def _write(self, text: str) -> None:
        if self._streams:
            self._sink(json.dumps(text, ensure_ascii=False)[1:-1])
        else:
            self._parts.append(text)
