"""Gemma 4: `<|tool_call>call:f{a:<|"|>text<|"|>,b:3}<tool_call|>`. Names are bare, and strings have quotes of their own."""

import json
from typing import Final

from cluster.ingress.parsers.argument_values import Schemas
from cluster.ingress.parsers.call_search import CallSearch, behind_call
from cluster.ingress.parsers.character_source import MAX_NAME, CharacterSource, call_or_text
from cluster.ingress.parsers.json_calls import known_name
from cluster.ingress.parsers.json_text import JsonText, Malformed
from cluster.ingress.parsers.markup_parser import EndOfText, EventWriter, Steps

BEGIN, END, QUOTE, CALL = "<|tool_call>", "<tool_call|>", '<|"|>', "call:"
MARKS: Final = (BEGIN, END, QUOTE)


def gemma_calls(writer: EventWriter, schemas: Schemas) -> Steps[None]:
    def call(source: CharacterSource) -> Steps[None]:
        yield from source.skip_space()
        source.unread(1)
        if not (yield from source.follows(CALL)):
            raise Malformed
        name = known_name((yield from source.until("{", MAX_NAME)), schemas)
        if not name or "<" in name or any(map(str.isspace, name)):
            raise Malformed
        writer.begin_call(name)
        source.settle()
        yield from _arguments(writer, source)

    search = CallSearch(writer, (BEGIN,))
    behind = ""
    while True:
        mark = behind or (yield from search.next())
        found = yield from call_or_text(writer, mark, call, restart=BEGIN)
        behind = "" if found is None else (yield from behind_call(writer, (END, BEGIN)))
        behind = "" if behind == END else behind


def _arguments(writer: EventWriter, source: CharacterSource) -> Steps[None]:
    """Write the object whose `{` is read as JSON."""
    value = JsonText(writer.arguments, (BEGIN,))
    value.push("{")
    try:
        while not value.is_done:
            character = yield from source.read()
            within = value.breaks is not None
            if character == "<" and not within and (yield from source.follows(QUOTE[1:])):
                value.push('"')
                yield from _string(source, value)
                value.push('"')
            else:
                value.push(character)
    except EndOfText as ended:
        if ended.cut:
            value.cut()
        if ended.cut or not value.close():
            raise
    source.unread(len(value.rest))
    writer.complete_arguments()
    source.settle()


def _string(source: CharacterSource, value: JsonText) -> Steps[None]:
    """Read a string up to its closing quote."""
    while True:
        character = yield from source.read()
        if character == "<" and (yield from source.follows(QUOTE[1:])):
            return
        for part in json.dumps(character, ensure_ascii=False)[1:-1]:
            value.push(part)
