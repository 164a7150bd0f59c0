"""Llama 3's calls as JSON objects, which have no marks of their own.

Text that begins like a call but names no tool of the request is text."""

from collections.abc import Callable

from cluster.ingress.parsers.argument_values import Schemas
from cluster.ingress.parsers.call_search import CallSearch, HeldCall, behind_call, ends_line
from cluster.ingress.parsers.character_source import FENCE, CharacterSource, call_or_text
from cluster.ingress.parsers.json_calls import call_object
from cluster.ingress.parsers.json_text import Malformed
from cluster.ingress.parsers.markup_parser import EventWriter, Steps

PYTHON_TAG = "<|python_tag|>"


def llama_json_calls(writer: EventWriter, schemas: Schemas) -> Steps[None]:
    """`{"name": "f", "parameters": {...}}`, several of them with `;` between."""

    def call(first: str) -> Callable[[CharacterSource], Steps[None]]:
        def read(source: CharacterSource) -> Steps[None]:
            opening = first or (yield from source.skip_space())
            opening = yield from source.past_fence(opening)
            if opening == "[":
                opening = yield from source.skip_space()
            if opening != "{":
                raise Malformed
            yield from call_object(writer, source, schemas, known_only=True)

        return read

    def within_text(source: CharacterSource) -> Steps[None]:
        held = HeldCall()
        yield from call_object(held, source, schemas, known_only=True, needs_arguments=True)
        yield from ends_line(source)
        held.write_to(writer)
        source.settle()

    search = CallSearch(writer, (PYTHON_TAG,), on_lines=FENCE[0] + "[", anywhere="{")
    while True:
        mark = yield from search.next()
        read = call("" if mark == PYTHON_TAG else mark)
        if mark == "{" and not search.at_line_start:
            read = within_text
        found = yield from call_or_text(writer, mark, read)
        is_fenced = found is not None and found.is_fenced
        while found is not None:
            ends = (PYTHON_TAG, FENCE) if is_fenced else (PYTHON_TAG,)
            mark = yield from behind_call(writer, ends, more="{")
            if mark not in ("{", PYTHON_TAG):
                break
            found = yield from call_or_text(writer, mark, call("{" if mark == "{" else ""))
        search.at_line_start = found is not None
