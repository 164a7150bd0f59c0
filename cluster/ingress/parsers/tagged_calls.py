"""Calls in tags, and each argument in its own: `<tool_call><function=f><parameter=a>value</parameter></function></tool_call>`.

Values are bare text: the tool's schema says what they are. Models leave tags out, and values may have tags in them; so a tag
counts where what follows it can follow it."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace

from cluster.ingress.parsers.argument_values import (
    Schema,
    Schemas,
    is_text,
    kinds_of,
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

_TAG_BEGIN = frozenset("<")


@dataclass(frozen=True, slots=True, kw_only=True)
class CallTags:
    """A call is `function NAME name_end (parameter KEY key_end value VALUE parameter_end)* function_end`."""

    begin: str = ""
    """What stands before a call, or before all calls of a turn where they are `listed`. Empty: a call begins with `function`."""
    end: str = ""
    listed: bool = False
    function: str
    name_end: str = ""
    """Where it does not end a tag, models may leave it out: then the name ends before the next tag or line."""
    function_end: str
    parameter: str
    key_end: str
    value: str = ""
    """A tag that begins a value, behind the key's. Models may leave it out."""
    text_sign: str = ""
    json_sign: str = ""
    """What stands behind the key of a string and of any other value, where the format tells them apart."""
    parameter_end: str
    newlines: bool = False
    """Whether a value stands on lines of its own: the line breaks around it are not a part of it."""

    @property
    def opening(self) -> str:
        return self.begin or self.function

    @property
    def openings(self) -> tuple[str, ...]:
        return tuple(filter(None, (self.begin, self.function)))

    @property
    def ends(self) -> tuple[str, ...]:
        return (self.end, *self.openings) if self.end else self.openings

    @property
    def followers(self) -> Mapping[str, tuple[str, ...]]:
        """Return what may follow a tag that ends a value, but for the text's end."""
        found = {
            self.parameter_end: (self.parameter, self.function_end, *self.ends),
            self.function_end: self.ends,
        }
        return {**found, self.end: (self.begin,)} if self.end else found

    @property
    def marks(self) -> tuple[str, ...]:
        """Return the tags that may be tokens of their own."""
        every = (self.begin, self.end, self.function, self.name_end, self.function_end, self.parameter)
        return tuple(
            tag
            for tag in (*every, self.key_end, self.value, self.parameter_end)
            if tag.startswith("<") and tag.endswith(">")
        )


QWEN_CODER = CallTags(
    begin="<tool_call>",
    end="</tool_call>",
    function="<function=",
    name_end=">",
    function_end="</function>",
    parameter="<parameter=",
    key_end=">",
    parameter_end="</parameter>",
    newlines=True,
)
SEED_OSS = replace(QWEN_CODER, begin="<seed:tool_call>", end="</seed:tool_call>", newlines=False)
MINIMAX_M2 = CallTags(
    begin="<minimax:tool_call>",
    end="</minimax:tool_call>",
    listed=True,
    function='<invoke name="',
    name_end='">',
    function_end="</invoke>",
    parameter='<parameter name="',
    key_end='">',
    parameter_end="</parameter>",
)
GLM = CallTags(
    function="<tool_call>",
    function_end="</tool_call>",
    parameter="<arg_key>",
    key_end="</arg_key>",
    value="<arg_value>",
    parameter_end="</arg_value>",
)
DEEPSEEK_V32 = CallTags(
    begin="<｜DSML｜function_calls>",
    end="</｜DSML｜function_calls>",
    listed=True,
    function='<｜DSML｜invoke name="',
    name_end='">',
    function_end="</｜DSML｜invoke>",
    parameter='<｜DSML｜parameter name="',
    key_end='"',
    text_sign=' string="true">',
    json_sign=' string="false">',
    parameter_end="</｜DSML｜parameter>",
)
DEEPSEEK_V4 = replace(DEEPSEEK_V32, begin="<｜DSML｜tool_calls>", end="</｜DSML｜tool_calls>")
HUNYUAN_3 = replace(GLM, begin="<tool_calls>", end="</tool_calls>", listed=True, name_end="<tool_sep>")
HUNYUAN_3_OPEN = CallTags(
    begin="<tool_calls:opensource>",
    end="</tool_calls:opensource>",
    listed=True,
    function="<tool_call:opensource>",
    name_end="<tool_sep:opensource>",
    function_end="</tool_call:opensource>",
    parameter="<arg_key:opensource>",
    key_end="</arg_key:opensource>",
    value="<arg_value:opensource>",
    parameter_end="</arg_value:opensource>",
)


def tagged_calls(writer: EventWriter, schemas: Schemas, tags: CallTags) -> Steps[None]:
    def begun(source: CharacterSource) -> Steps[None]:
        yield from source.skip_space()
        source.unread(1)
        if not (yield from source.follows(tags.function)):
            raise Malformed
        yield from _Call(writer, source, schemas, tags).read(known_only=False)

    def bare(source: CharacterSource) -> Steps[None]:
        yield from _Call(writer, source, schemas, tags).read(known_only=bool(tags.begin))

    def following(source: CharacterSource) -> Steps[None]:
        yield from _Call(writer, source, schemas, tags).read(known_only=False)

    search = CallSearch(writer, tags.openings)
    behind = ""
    while True:
        mark = behind or (yield from search.next())
        call = begun if mark == tags.begin else following if behind else bare
        found = yield from call_or_text(writer, mark, call, restart=tags.opening)
        behind = "" if found is None else (yield from behind_call(writer, tags.ends))
        behind = "" if behind == tags.end else behind


class _Call:
    def __init__(
        self, writer: EventWriter, source: CharacterSource, schemas: Schemas, tags: CallTags
    ) -> None:
        self._writer, self._source, self._schemas, self._tags = writer, source, schemas, tags
        self._followers = tags.followers
        self._tool: Schema = {}
        self._given: set[str] = set()

    def read(self, *, known_only: bool) -> Steps[None]:
        """Read a call whose `<function=` is read."""
        writer, source = self._writer, self._source
        name = known_name((yield from self._name()), self._schemas)
        if not name or self._tags.opening in name or (known_only and name not in self._schemas):
            raise Malformed
        writer.begin_call(name)
        source.settle()
        self._tool = self._schemas.get(name, {})
        if (yield from self._begins_object()):
            behind = yield from arguments_value(writer, source, "{", self._tool)
            source.unread(len(behind))
            yield from self._next_tag()
            return
        try:
            tag = yield from self._next_tag()
            while tag:
                key = (yield from source.until(self._tags.key_end, MAX_NAME)).strip()
                tag = yield from self._parameter(key)
        except EndOfText as ended:
            if ended.cut:
                raise
        writer.arguments("}" if self._given else "{}")
        writer.complete_arguments()
        source.settle()

    def _begins_object(self) -> Steps[bool]:
        """Return whether the arguments are one object. Its first character is then read."""
        try:
            if (yield from self._source.skip_space()) == "{":
                return True
        except EndOfText as ended:
            if ended.cut:
                raise
            return False
        self._source.unread(1)
        return False

    def _name(self) -> Steps[str]:
        source, end = self._source, self._tags.name_end
        if end.endswith(">") and not end.startswith("<"):
            return (yield from source.until(end, MAX_NAME))
        name, character = "", (yield from source.read())
        while character not in "<{\n":
            name += character
            if len(name) > MAX_NAME:
                raise Malformed
            character = yield from source.read()
        source.unread(1)
        if not name or any(part.isspace() for part in name.strip()):
            raise Malformed
        yield from source.follows(end)
        return name

    def _next_tag(self) -> Steps[str]:
        """Return the tag of a parameter, or nothing where the call ends. The end's tag is read where it is there."""
        source, tags = self._source, self._tags
        yield from source.skip_space()
        source.unread(1)
        if (yield from source.follows(tags.parameter)):
            return tags.parameter
        yield from source.follows(tags.function_end)
        return ""

    def _parameter(self, key: str) -> Steps[str]:
        """Read a parameter's value. Returns the next tag as `_next_tag` does."""
        tags = self._tags
        schema = property_of(self._tool, key)
        if (yield from self._is_text()) and "string" in kinds_of(schema, self._tool):
            schema = {"type": "string"}
        self._writer.arguments(("{" if not self._given else ", ") + f"{to_json(key)}: ")
        self._given.add(key)
        value = _Value(self._writer.arguments, streams=is_text(schema), newlines=tags.newlines)
        try:
            yield from self._begin_value()
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
        if end == tags.parameter_end:
            return (yield from self._next_tag())
        return end if end == tags.parameter else ""

    def _is_text(self) -> Steps[bool]:
        """Read the sign of a value's kind, where there is one. Returns whether it is that of a string."""
        tags, source = self._tags, self._source
        if tags.text_sign and (yield from source.follows(tags.text_sign)):
            return True
        if tags.json_sign and not (yield from source.follows(tags.json_sign)):
            yield from source.until(">", MAX_NAME)
        return False

    def _begin_value(self) -> Steps[None]:
        if self._tags.value:
            yield from self._source.skip_space()
            self._source.unread(1)
            yield from self._source.follows(self._tags.value)

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
        source, tags = self._source, self._tags
        for tag, followers in self._followers.items():
            if (yield from source.follows(tag)):
                if (yield from self._followed_by(followers)):
                    if tag == tags.end:
                        source.unread(len(tag))
                    return tag
                source.unread(len(tag))
                return None
        if (yield from self._begins_next()):
            yield from source.follows(tags.parameter)
            return tags.parameter
        return None

    def _followed_by(self, tags: tuple[str, ...]) -> Steps[bool]:
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
                apart = not space or "\n" in space
                found = tag != self._tags.parameter or apart or (yield from self._begins_next())
                break
        source.unread(len(space))
        return found

    def _begins_next(self) -> Steps[bool]:
        """Return whether another parameter of the tool begins here. Nothing is read."""
        source, tags = self._source, self._tags
        if not (yield from source.follows(tags.parameter)):
            return False
        found = ""
        for key in properties_of(self._tool):
            if key not in self._given and (yield from source.follows(key + tags.key_end)):
                found = key + tags.key_end
                break
        source.unread(len(tags.parameter + found))
        return bool(found)


class _Value:
    """A value, with `newlines` without those around it."""

    def __init__(self, sink: Sink, *, streams: bool, newlines: bool) -> None:
        """With `streams` the value is a string, which goes out as it comes."""
        self._sink, self._streams, self._newlines = sink, streams, newlines
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
            text = text.removeprefix("\n") if self._newlines else text
        text = self._newline + text
        self._newline = "\n" if self._newlines and text.endswith("\n") else ""
        self._write(text.removesuffix(self._newline))

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
