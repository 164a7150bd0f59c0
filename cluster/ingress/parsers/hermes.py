"""Hermes and Qwen: `<tool_call>` and `</tool_call>` around each `{"name": "f", "arguments": {...}}`."""

from cluster.ingress.parsers.argument_values import Schemas
from cluster.ingress.parsers.call_search import CallSearch, behind_call, unmarked_objects
from cluster.ingress.parsers.character_source import FENCE, CharacterSource, call_or_text
from cluster.ingress.parsers.json_calls import call_object
from cluster.ingress.parsers.json_text import Malformed
from cluster.ingress.parsers.markup_parser import EventWriter, Steps

BEGIN, END = "<tool_call>", "</tool_call>"


def hermes_calls(writer: EventWriter, schemas: Schemas) -> Steps[None]:
    def tagged(source: CharacterSource) -> Steps[None]:
        first = yield from source.past_fence((yield from source.skip_space()))
        if first == "[":
            first = yield from source.skip_space()
        if first != "{":
            raise Malformed
        yield from call_object(writer, source, schemas)

    def following(source: CharacterSource) -> Steps[None]:
        yield from call_object(writer, source, schemas)

    def untagged(source: CharacterSource) -> Steps[None]:
        yield from unmarked_objects(writer, source, schemas, "{", END)

    search = CallSearch(writer, (BEGIN,), on_lines="{")
    mark = ""
    while True:
        mark = mark or (yield from search.next())
        found = yield from call_or_text(writer, mark, tagged if mark == BEGIN else untagged, restart=BEGIN)
        mark = ""
        while found is not None:
            fences = (FENCE,) if found.is_fenced else ()
            behind = yield from behind_call(writer, (END, BEGIN, *fences), more="{")
            if behind == "{":
                found = yield from call_or_text(writer, "{", following, restart=BEGIN)
            elif behind != FENCE:
                mark = behind if behind == BEGIN else ""
                break
        search.at_line_start = found is not None
