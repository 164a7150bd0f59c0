"""Calls as Python: a list of them, `[f(a=1, b="x"), g()]`, of Llama 3.2 and 4, and of LFM2 between marks; lines of Olmo 3.

Text that begins like a call but names no tool of the request is text. The arguments go out as JSON, one by one."""

import json
import re
from collections.abc import Callable
from dataclasses import dataclass

from cluster.ingress.parsers.argument_values import (
    Schema,
    Schemas,
    fitted,
    named,
    of_bare_text,
    of_literal,
    properties_of,
    property_of,
    to_json,
)
from cluster.ingress.parsers.call_search import (
    CallSearch,
    HeldCall,
    behind_call,
    ends_line,
    first_letters,
    tool_name,
)
from cluster.ingress.parsers.character_source import FENCE, CharacterSource, call_or_text
from cluster.ingress.parsers.json_text import Malformed
from cluster.ingress.parsers.llama import PYTHON_TAG
from cluster.ingress.parsers.markup_parser import CallWriter, EndOfText, EventWriter, Steps

PYTHON_START, PYTHON_END = "<|python_start|>", "<|python_end|>"


@dataclass(frozen=True, slots=True, kw_only=True)
class PythonCallMarks:
    """What may stand around calls. Models leave it out."""

    begins: tuple[str, ...]
    end: str
    listed: bool = True
    """Whether calls are a list in brackets. Otherwise each is a line."""


LLAMA = PythonCallMarks(begins=(PYTHON_START, PYTHON_TAG), end=PYTHON_END)
LFM2 = PythonCallMarks(begins=("<|tool_call_start|>",), end="<|tool_call_end|>")
OLMO_3 = PythonCallMarks(begins=("<function_calls>",), end="</function_calls>", listed=False)
_KEY = re.compile(r"\s*([A-Za-z_]\w*)\s*=(?!=)")
_ENDS_STRING = frozenset(",)]}:\"'%+.")
"""What may stand behind a string's closing quote."""


def pythonic_calls(writer: EventWriter, schemas: Schemas, around: PythonCallMarks) -> Steps[None]:
    def call(first: str, *, within_text: bool) -> Callable[[CharacterSource], Steps[None]]:
        def read(source: CharacterSource) -> Steps[None]:
            opening = first or (yield from source.skip_space())
            opening = yield from source.past_fence(opening)
            if within_text:
                yield from _within_text(writer, source, schemas)
            elif not first and not around.listed:
                yield from _lines(writer, source, schemas, opening)
            elif opening == "[":
                yield from _listed(writer, source, schemas)
            else:
                yield from _alone(writer, source, schemas, opening)

        return read

    marks, marked = around.begins, call("", within_text=False)
    search = CallSearch(writer, marks, on_lines=FENCE[0] + first_letters(schemas), anywhere="[")
    while True:
        mark = yield from search.next()
        read = call(mark, within_text=not search.at_line_start) if mark not in marks else marked
        found = yield from call_or_text(writer, mark, read)
        if found is not None:
            ends = (around.end, FENCE) if found.is_fenced else (around.end,)
            while (yield from behind_call(writer, ends)):
                pass
        search.at_line_start = found is not None


def _listed(writer: EventWriter, source: CharacterSource, schemas: Schemas) -> Steps[None]:
    """Read calls up to the list's end. A list of none is text."""
    behind, first = ",", (yield from source.skip_space())
    if first == "]":
        raise Malformed
    while behind == "," and first != "]":
        yield from _call(writer, source, schemas, first)
        writer.end_call()
        source.settle()
        behind = yield from source.skip_space()
        first = (yield from source.skip_space()) if behind == "," else "]"
    if behind not in ",]":
        raise Malformed
    source.settle()


def _lines(writer: EventWriter, source: CharacterSource, schemas: Schemas, first: str) -> Steps[None]:
    """Read calls up to the mark that ends them. Marks without a call are text."""
    if first == "<":
        raise Malformed
    while first != "<":
        yield from _call(writer, source, schemas, first)
        writer.end_call()
        source.settle()
        first = yield from source.skip_space()
        if first == ",":
            first = yield from source.skip_space()
    source.unread(1)


def _alone(writer: EventWriter, source: CharacterSource, schemas: Schemas, first: str) -> Steps[None]:
    """Read a call without its list's brackets. It is one where a line ends behind it."""
    held = HeldCall()
    yield from _call(held, source, schemas, first)
    yield from ends_line(source)
    held.write_to(writer)
    source.settle()


def _within_text(writer: EventWriter, source: CharacterSource, schemas: Schemas) -> Steps[None]:
    """Read a list that begins within a line. It is one of calls where the line ends behind it."""
    held: list[HeldCall] = []
    behind = ","
    while behind == ",":
        held.append(HeldCall())
        yield from _call(held[-1], source, schemas, (yield from source.skip_space()))
        behind = yield from source.skip_space()
    if behind != "]":
        raise Malformed
    yield from ends_line(source)
    for call in held:
        call.write_to(writer)
    source.settle()


def _call(writer: CallWriter, source: CharacterSource, schemas: Schemas, first: str) -> Steps[None]:
    name = yield from tool_name(source, first, schemas)
    if (yield from source.read()) != "(":
        raise Malformed
    writer.begin_call(name)
    tool, num_given, end = schemas[name], 0, ""
    while end != ")":
        source.settle()
        try:
            text, end = yield from _argument(source)
        except EndOfText:
            writer.arguments(("{" if not num_given else ", ") + _begun(source.unsettled.strip()))
            raise
        if members := _members(text.strip(), tool, num_given):
            writer.arguments(("{" if not num_given else ", ") + members)
            num_given += 1
    writer.arguments("}" if num_given else "{}")
    writer.complete_arguments()


def _argument(source: CharacterSource) -> Steps[tuple[str, str]]:
    """Return the text of one argument, and the `,` or `)` behind it."""
    parts: list[str] = []
    depth = 0
    while True:
        character = yield from source.read()
        if character in "\"'":
            parts.append((yield from _string(source, character)))
            continue
        if depth <= 0 and character in ",)":
            return "".join(parts), character
        depth += (character in "([{") - (character in ")]}")
        parts.append(character)


def _string(source: CharacterSource, quote: str) -> Steps[str]:
    """Return a string with its quotes. A quote that nothing follows which may follow a string is part of it."""
    if (yield from source.follows(quote * 2)):
        return quote * 3 + (yield from source.until(quote * 3)) + quote * 3
    parts = [quote]
    while True:
        character = yield from source.read()
        parts.append(character)
        if character == "\\":
            parts.append((yield from source.read()))
        elif character == quote:
            if (yield from _ends_here(source)):
                return "".join(parts)
            parts[-1] = "\\" + quote


def _ends_here(source: CharacterSource) -> Steps[bool]:
    num_read = 1
    character = yield from source.read()
    while character.isspace():
        character = yield from source.read()
        num_read += 1
    source.unread(num_read)
    return character in _ENDS_STRING


def _members(text: str, tool: Schema, num_before: int) -> str:
    """Return an argument as members of an object, without its braces. Arguments without names have those of the schema."""
    if not text:
        return ""
    if text.startswith("**") and (members := of_literal(text[2:].strip())) is not None:
        return members.strip()[1:-1]
    if key := _KEY.match(text):
        name, text = key[1], text[key.end() :].strip()
    else:
        names = list(properties_of(tool))
        value = of_literal(text)
        if not num_before and value is not None and value[:1] == "{":
            return _unwrapped(value, tool)
        name = names[num_before] if num_before < len(names) else f"arg{num_before}"
    return f"{to_json(name)}: {_value(text, property_of(tool, name), tool)}"


def _begun(text: str) -> str:
    """Return an argument that the text's end cuts, as far as it came."""
    key = _KEY.match(text)
    value = text[key.end() :].strip() if key else text
    written = to_json(value[1:])[:-1] if value[:1] in ("'", '"') else value
    return f"{to_json(key[1])}: {written}" if key else written


def _unwrapped(value: str, tool: Schema) -> str:
    """Return the members of an object that stands for all arguments, or is the first of them."""
    found = named([json.loads(value)], tool)
    return (found or value)[1:-1]


def _value(text: str, schema: object, tool: Schema) -> str:
    """Return a literal of JSON or Python as JSON. Anything else becomes what its schema says."""
    found = of_literal(text)
    return of_bare_text(text, schema, tool) if found is None else fitted(found, schema, tool)
