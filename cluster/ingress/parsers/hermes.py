"""Hermes and Qwen: `<tool_call>` and `</tool_call>` around each `{"name": "f", "arguments": {...}}`."""

from cluster.ingress.parsers.character_source import CharacterSource, Malformed, call_or_text
from cluster.ingress.parsers.json_calls import call_object
from cluster.ingress.parsers.markup_parser import EventWriter, Steps, copy_until, skip_until

BEGIN, END = "<tool_call>", "</tool_call>"


def hermes_calls(writer: EventWriter) -> Steps[None]:
    def call(source: CharacterSource) -> Steps[None]:
        if (yield from source.skip_space()) != "{":
            raise Malformed
        yield from call_object(writer, source)

    marker = ""
    while True:
        if marker != BEGIN:
            yield from copy_until((BEGIN,), writer.text)
        marker = ""
        if (yield from call_or_text(writer, BEGIN, call)):
            marker = yield from skip_until((BEGIN, END))
