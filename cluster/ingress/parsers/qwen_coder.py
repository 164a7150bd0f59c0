"""Qwen3-Coder's XML: `<tool_call><function=f><parameter=a>value</parameter></function></tool_call>`.

Values are bare text: the tool's schema says which of them are strings."""

import json
from collections.abc import Mapping
from typing import Any

from cluster.ingress.parsers.character_source import (
    MAX_NAME,
    CharacterSource,
    Malformed,
    call_or_text,
    to_json,
)
from cluster.ingress.parsers.markup_parser import EventWriter, Steps, copy_until, skip_until

BEGIN, END = "<tool_call>", "</tool_call>"
FUNCTION, FUNCTION_END = "<function=", "</function>"
PARAMETER, PARAMETER_END = "<parameter=", "</parameter>"

Schemas = Mapping[str, Mapping[str, Any]]
"""The JSON schema of each tool's parameters, by the tool's name."""


def qwen_coder_calls(writer: EventWriter, schemas: Schemas) -> Steps[None]:
    def call(source: CharacterSource) -> Steps[None]:
        yield from _call(writer, source, schemas)

    marker = ""
    while True:
        if marker != BEGIN:
            yield from copy_until((BEGIN,), writer.text)
        marker = ""
        if (yield from call_or_text(writer, BEGIN, call)):
            marker = yield from skip_until((BEGIN, END))


def _call(writer: EventWriter, source: CharacterSource, schemas: Schemas) -> Steps[None]:
    head = (yield from source.skip_space()) + (yield from source.until(">", MAX_NAME))
    name = head.removeprefix(FUNCTION).strip()
    if not head.startswith(FUNCTION) or not name:
        raise Malformed
    writer.begin_call(name)
    properties = schemas.get(name, {}).get("properties", {})
    opening = "{"
    while (yield from _next_marker(source)) == PARAMETER:
        key = (yield from source.until(">", MAX_NAME)).strip()
        value = _without_newlines((yield from source.until(PARAMETER_END)))
        writer.arguments(f"{opening}{to_json(key)}: {_as_json(value, properties.get(key, {}))}")
        opening = ", "
    writer.arguments("{}" if opening == "{" else "}")
    writer.complete_arguments()


def _next_marker(source: CharacterSource) -> Steps[str]:
    """Return the mark of a parameter's beginning, or the end of the call where something else stands."""
    text = yield from source.skip_space()
    while PARAMETER.startswith(text) and text != PARAMETER:
        text += yield from source.read()
    if text != PARAMETER and not FUNCTION_END.startswith(text):
        raise Malformed
    return text


def _without_newlines(value: str) -> str:
    """Return the value without the newlines around it, since the template puts each value on lines of its own."""
    return value.removeprefix("\n").removesuffix("\n")


def _as_json(value: str, schema: Any) -> str:
    kind = schema.get("type") if isinstance(schema, Mapping) else None
    if kind != "string":
        try:
            return to_json(json.loads(value))
        except (ValueError, RecursionError):
            pass
    return to_json(value)
