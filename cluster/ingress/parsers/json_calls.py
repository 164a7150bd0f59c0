"""Calls written as JSON objects, `{"name": "f", "arguments": {...}}`: the arguments go out while they are written."""

import re

from cluster.ingress.parsers.argument_values import Schema, Schemas, object_text
from cluster.ingress.parsers.character_source import CharacterSource
from cluster.ingress.parsers.json_text import Malformed
from cluster.ingress.parsers.markup_parser import CallWriter, EndOfText, Steps

_BEFORE_NAME = re.compile(r"^.*[.:/]", re.DOTALL)
"""`functions.`, or a server's name, as some models write them."""
_ARGUMENTS = ("arguments", "parameters")
_NAMES = ("name", "function", "tool_name")
_MEMBERS = (*_NAMES, *_ARGUMENTS, "id", "type", "index", "tool_call_id")


def call_object(
    writer: CallWriter,
    source: CharacterSource,
    schemas: Schemas,
    *,
    known_only: bool = False,
    needs_arguments: bool = False,
) -> Steps[None]:
    """Read the rest of an object whose `{` is read, as one call. With `known_only` only the tools' names make it a call. Raises
    Malformed; what it wrote before that stays written."""
    call = _JsonCall(writer, source, schemas, known_only=known_only)
    behind = yield from call.members()
    if behind != "}" or (needs_arguments and not call.has_arguments):
        raise Malformed
    call.end()
    source.settle()


def named_object(writer: CallWriter, source: CharacterSource, schemas: Schemas) -> Steps[None]:
    """Read the rest of an object `{"f": {...}}` whose `{` is read, as one call. Raises Malformed."""
    name = known_name((yield from source.word((yield from source.skip_space()))), schemas)
    if not name or (yield from source.skip_space()) != ":":
        raise Malformed
    writer.begin_call(name)
    first = yield from source.skip_space()
    behind = yield from arguments_value(writer, source, first, schemas.get(name, {}))
    if not behind or behind.isspace():
        behind = yield from source.skip_space()
    if behind != "}":
        source.unread(len(behind))
    source.settle()


def arguments_value(writer: CallWriter, source: CharacterSource, first: str, tool: Schema) -> Steps[str]:
    """Write the arguments that begin with `first`: an object, or what stands for one. Returns the character behind them where
    that had to be read."""
    if first == "{":
        behind = yield from source.json_value(first, writer.arguments)
    else:
        parts: list[str] = []
        try:
            behind = yield from source.json_value(first, parts.append)
        except EndOfText:
            writer.arguments("".join(parts))
            raise
        writer.arguments(object_text("".join(parts), tool))
    writer.complete_arguments()
    source.settle(len(behind))
    return behind


class _JsonCall:
    """One object's members. The call begins as soon as its name is known, in whatever order they come."""

    def __init__(
        self, writer: CallWriter, source: CharacterSource, schemas: Schemas, *, known_only: bool
    ) -> None:
        self._writer, self._source, self._schemas = writer, source, schemas
        self._known_only = known_only
        self._name = ""
        self._early: str | None = None
        """Arguments that came before the name."""
        self.has_arguments = False

    def members(self) -> Steps[str]:
        """Read members up to what ends the object, and return that."""
        source = self._source
        first = yield from source.skip_space()
        while first != "}":
            behind = yield from self._member(first)
            if not behind or behind.isspace():
                behind = yield from source.skip_space()
            if behind != ",":
                return behind
            first = yield from source.skip_space()
        return first

    def end(self) -> None:
        if not self._name:
            raise Malformed
        if not self.has_arguments:
            self._writer.arguments("{}")
            self._writer.complete_arguments()

    def _member(self, first: str) -> Steps[str]:
        """Read a member, and return the character behind it where that had to be read."""
        source = self._source
        key = yield from source.word(first)
        if (yield from source.skip_space()) != ":" or (self._known_only and key not in _MEMBERS):
            raise Malformed
        first = yield from source.skip_space()
        if key in _NAMES and not self._name and first in ('"', "'"):
            self._begin((yield from source.word(first)))
            return ""
        if key == "function" and not self._name and first == "{":
            return "" if (yield from self.members()) == "}" else "?"
        if key in _ARGUMENTS and not self.has_arguments:
            return (yield from self._arguments(first))
        return (yield from source.json_value(first, lambda _: None))

    def _arguments(self, first: str) -> Steps[str]:
        self.has_arguments = True
        if self._name:
            return (yield from arguments_value(self._writer, self._source, first, self._tool))
        parts: list[str] = []
        behind = yield from self._source.json_value(first, parts.append)
        self._early = "".join(parts)
        return behind

    @property
    def _tool(self) -> Schema:
        return self._schemas.get(self._name, {})

    def _begin(self, name: str) -> None:
        self._name = known_name(name, self._schemas)
        if not self._name or (self._known_only and self._name not in self._schemas):
            raise Malformed
        self._writer.begin_call(self._name)
        if self._early is not None:
            self._writer.arguments(object_text(self._early, self._tool))
            self._writer.complete_arguments()


def known_name(name: str, schemas: Schemas) -> str:
    """Return a tool's name without what models write before it."""
    name = name.strip()
    bare = _BEFORE_NAME.sub("", name)
    return bare if name not in schemas and bare in schemas else name
