"""Mistral: `[TOOL_CALLS]` before a list of JSON calls, or (since tokenizer v11) before each `name[ARGS]{...}`."""

from collections.abc import Callable

from cluster.ingress.parsers.argument_values import Schemas
from cluster.ingress.parsers.call_search import (
    CallSearch,
    behind_call,
    first_letters,
    tool_name,
    unmarked_objects,
)
from cluster.ingress.parsers.character_source import FENCE, MAX_NAME, CharacterSource, call_or_text
from cluster.ingress.parsers.json_calls import arguments_value, call_object, known_name
from cluster.ingress.parsers.json_text import Malformed
from cluster.ingress.parsers.markup_parser import EventWriter, Steps

BEGIN, ID, ARGUMENTS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"


def mistral_calls(writer: EventWriter, schemas: Schemas) -> Steps[None]:
    def marked(source: CharacterSource) -> Steps[None]:
        first = yield from source.past_fence((yield from source.skip_space()))
        if first == "[":
            yield from _listed(writer, source, schemas)
        elif first == "{":
            yield from call_object(writer, source, schemas)
        else:
            yield from _named(writer, source, schemas, first)

    def unmarked(first: str) -> Callable[[CharacterSource], Steps[None]]:
        def read(source: CharacterSource) -> Steps[None]:
            if first == "[":
                yield from unmarked_objects(writer, source, schemas, first, "")
                return
            name = yield from tool_name(source, first, schemas)
            if not (yield from source.follows(ARGUMENTS)):
                raise Malformed
            yield from _arguments(writer, source, schemas, name)

        return read

    search = CallSearch(writer, (BEGIN,), on_lines="[" + first_letters(schemas))
    while True:
        mark = yield from search.next()
        call = marked if mark == BEGIN else unmarked(mark)
        found = yield from call_or_text(writer, mark, call, restart=BEGIN)
        if found is not None and found.is_fenced:
            yield from behind_call(writer, (FENCE,))
        search.at_line_start = found is not None


def _listed(writer: EventWriter, source: CharacterSource, schemas: Schemas) -> Steps[None]:
    first = yield from source.skip_space()
    while first == "{":
        yield from call_object(writer, source, schemas)
        writer.end_call()
        first = yield from source.skip_space()
        if first == ",":
            first = yield from source.skip_space()
    if not writer.num_ended_calls:
        raise Malformed
    if first != "]":  # the list is not closed
        source.unread(1)
    source.settle()


def _named(writer: EventWriter, source: CharacterSource, schemas: Schemas, first: str) -> Steps[None]:
    head = first
    while not head.endswith(("{", ARGUMENTS)):
        head += yield from source.read()
        if len(head) > MAX_NAME:
            raise Malformed
    if is_bare := head.endswith("{"):
        source.unread(1)
    head = head.removesuffix("{" if is_bare else ARGUMENTS)
    name = known_name(head.partition(ID)[0], schemas)
    if not name or BEGIN in name or "\n" in name:
        raise Malformed
    yield from _arguments(writer, source, schemas, name)


def _arguments(writer: EventWriter, source: CharacterSource, schemas: Schemas, name: str) -> Steps[None]:
    writer.begin_call(name)
    first = yield from source.skip_space()
    if first == "[" and (yield from source.follows(BEGIN[1:])):
        source.unread(len(BEGIN))
        behind = ""
        writer.arguments("{}")
        writer.complete_arguments()
    else:
        behind = yield from arguments_value(writer, source, first, schemas.get(name, {}))
    source.unread(len(behind))
    source.settle()
