"""Llama 3's calls without marks: the whole answer is JSON objects, or (3.2 and 4) a Python list of calls.

Text that begins like a call but names no tool of the request is text."""

import ast
import json
from collections.abc import Collection

from cluster.ingress.parsers.character_source import CharacterSource, Malformed, call_or_text, to_json
from cluster.ingress.parsers.json_calls import call_object
from cluster.ingress.parsers.markup_parser import EventWriter, Steps, plain_text

PYTHON_TAG = "<|python_tag|>"
PYTHON_START, PYTHON_END = "<|python_start|>", "<|python_end|>"


def llama_json_calls(writer: EventWriter, known: Collection[str]) -> Steps[None]:
    """`{"name": "f", "parameters": {...}}`, several of them with `;` between."""

    def calls(source: CharacterSource) -> Steps[None]:
        first = yield from _behind_tag(source, PYTHON_TAG)
        while first == "{":
            yield from call_object(writer, source, known)
            writer.end_call()
            first = yield from source.skip_space()
            if first in ";,":
                first = yield from source.skip_space()
        if not writer.num_ended_calls:
            raise Malformed
        writer.unread(first)

    yield from call_or_text(writer, "", calls)
    yield from plain_text(writer)


def pythonic_calls(writer: EventWriter, known: Collection[str]) -> Steps[None]:
    """`[f(a=1, b="x"), g()]`; the arguments go out as JSON, one by one."""

    def calls(source: CharacterSource) -> Steps[None]:
        if (yield from _behind_tag(source, PYTHON_START)) != "[":
            raise Malformed
        behind = ","
        while behind == ",":
            yield from _python_call(writer, source, known)
            behind = yield from source.skip_space()
        end = ""
        while PYTHON_END.startswith(end) and end != PYTHON_END:
            end += yield from source.skip_space()

    yield from call_or_text(writer, "", calls)
    yield from plain_text(writer)


def _behind_tag(source: CharacterSource, tag: str) -> Steps[str]:
    """Return the first character that is neither white space nor part of `tag`."""
    first = yield from source.skip_space()
    for expected in tag if first == tag[0] else "":
        if first != expected:
            raise Malformed
        first = yield from source.read()
    return first if not first.isspace() else (yield from source.skip_space())


def _python_call(writer: EventWriter, source: CharacterSource, known: Collection[str]) -> Steps[None]:
    name = yield from source.skip_space()
    while not name.endswith("("):
        name += yield from source.read()
        if len(name) > 1 + max(map(len, known), default=0):
            raise Malformed
    if name[:-1] not in known:
        raise Malformed
    writer.begin_call(name[:-1])
    opening, end = "{", ""
    while end != ")":
        text, end = yield from _python_argument(source)
        key, _, value = text.partition("=")
        if text.strip():
            writer.arguments(f"{opening}{to_json(key.strip())}: {_as_json(value.strip())}")
            opening = ", "
    writer.arguments("{}" if opening == "{" else "}")
    writer.complete_arguments()
    writer.end_call()


def _python_argument(source: CharacterSource) -> Steps[tuple[str, str]]:
    """Return the text of one argument, and the `,` or `)` behind it."""
    parts: list[str] = []
    depth, quote, escaped = 0, "", False
    while True:
        character = yield from source.read()
        if quote:
            quote = quote if escaped or character != quote else ""
            escaped = not escaped and character == "\\"
        elif character in "\"'":
            quote = character
        elif not depth and character in ",)":
            return "".join(parts), character
        else:
            depth += (character in "([{") - (character in ")]}")
        parts.append(character)


def _as_json(text: str) -> str:
    """Return a literal of JSON or Python as JSON. Anything else becomes a string."""
    for read in (json.loads, ast.literal_eval):
        try:
            return to_json(read(text))
        except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
            pass
    return to_json(text)
