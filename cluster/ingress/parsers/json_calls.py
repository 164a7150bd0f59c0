"""Calls written as JSON objects, `{"name": "f", "arguments": {...}}`: the arguments go out while they are written."""

from collections.abc import Collection

from cluster.ingress.parsers.character_source import CharacterSource, Malformed
from cluster.ingress.parsers.markup_parser import EventWriter, Sink, Steps

_ARGUMENTS = ("arguments", "parameters")


def call_object(
    writer: EventWriter, source: CharacterSource, known: Collection[str] | None = None
) -> Steps[None]:
    """Read the rest of an object whose `{` is read, as one call. Only the names `known` make it a call. Raises Malformed; what it
    wrote before that stays written."""
    call = _JsonCall(writer, source, known)
    first = yield from source.skip_space()
    while first != "}":
        behind = yield from call.member(first)
        if not behind or behind.isspace():
            behind = yield from source.skip_space()
        if behind not in ",}":
            raise Malformed
        first = behind if behind == "}" else (yield from source.skip_space())
    call.end()


class _JsonCall:
    """One object's members. The call begins as soon as its name is known, in whatever order they come."""

    def __init__(self, writer: EventWriter, source: CharacterSource, known: Collection[str] | None) -> None:
        self._writer, self._source, self._known = writer, source, known
        self._name = ""
        self._early: list[str] = []
        """Arguments that came before the name."""
        self._has_arguments = False

    def member(self, first: str) -> Steps[str]:
        """Read a member, and return the character behind it where that had to be read."""
        source = self._source
        key = yield from source.string(first)
        if (yield from source.skip_space()) != ":":
            raise Malformed
        first = yield from source.skip_space()
        if key == "name" and not self._name:
            self._begin((yield from source.string(first)))
            return ""
        if key in _ARGUMENTS and not self._has_arguments:
            self._has_arguments = True
            yield from _arguments(source, first, self._writer.arguments if self._name else self._early.append)
            self._complete()
            return ""
        return (yield from source.json_value(first, lambda _: None))

    def end(self) -> None:
        if not self._name:
            raise Malformed
        if not self._has_arguments:
            self._writer.arguments("{}")
            self._writer.complete_arguments()

    def _complete(self) -> None:
        if self._name and self._has_arguments:
            self._writer.complete_arguments()

    def _begin(self, name: str) -> None:
        if not name or (self._known is not None and name not in self._known):
            raise Malformed
        self._name = name
        self._writer.begin_call(name)
        self._writer.arguments("".join(self._early))
        self._complete()


def _arguments(source: CharacterSource, first: str, sink: Sink) -> Steps[None]:
    """Read the arguments: an object, or a string with the object's JSON in it, which some models write."""
    if first == '"':
        sink((yield from source.string(first)))
    elif first == "{":
        yield from source.json_value(first, sink)
    else:
        raise Malformed
