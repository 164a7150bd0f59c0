"""Mistral: `[TOOL_CALLS]` before a list of JSON calls, or (since tokenizer v11) before each `name[ARGS]{...}`."""

from cluster.ingress.parsers.character_source import MAX_NAME, CharacterSource, Malformed, call_or_text
from cluster.ingress.parsers.json_calls import call_object
from cluster.ingress.parsers.markup_parser import EventWriter, Steps, copy_until

BEGIN, ID, ARGUMENTS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"


def mistral_calls(writer: EventWriter) -> Steps[None]:
    def calls(source: CharacterSource) -> Steps[None]:
        first = yield from source.skip_space()
        if first == "[":
            yield from _listed(writer, source)
        elif first == "{":
            yield from call_object(writer, source)
        else:
            yield from _named(writer, source, first)

    while True:
        yield from copy_until((BEGIN,), writer.text)
        yield from call_or_text(writer, BEGIN, calls)


def _listed(writer: EventWriter, source: CharacterSource) -> Steps[None]:
    behind = ","
    while behind == ",":
        if (yield from source.skip_space()) != "{":
            raise Malformed
        yield from call_object(writer, source)
        writer.end_call()
        behind = yield from source.skip_space()


def _named(writer: EventWriter, source: CharacterSource, first: str) -> Steps[None]:
    head = first + (yield from source.until("{", MAX_NAME))
    name = head.strip().removesuffix(ARGUMENTS).partition(ID)[0].strip()
    if not name or BEGIN in name or "\n" in name:
        raise Malformed
    writer.begin_call(name)
    yield from source.json_value("{", writer.arguments)
    writer.complete_arguments()
