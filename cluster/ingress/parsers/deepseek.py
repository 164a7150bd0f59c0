"""DeepSeek-V3 and R1 (`function<sep>name`, then the arguments in a ```json block) and V3.1 (`name<sep>{...}`)."""

from cluster.ingress.parsers.character_source import MAX_NAME, CharacterSource, Malformed, call_or_text
from cluster.ingress.parsers.markup_parser import EventWriter, Steps, copy_until, skip_until

CALLS_BEGIN, CALLS_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
CALL_BEGIN, CALL_END = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"
SEPARATOR = "<｜tool▁sep｜>"


def deepseek_calls(writer: EventWriter) -> Steps[None]:
    def call(source: CharacterSource) -> Steps[None]:
        yield from _call(writer, source)

    marker = CALLS_END
    while True:
        if marker == CALLS_END:
            marker = yield from copy_until((CALLS_BEGIN, CALL_BEGIN), writer.text)
        if marker != CALL_BEGIN:
            marker = yield from skip_until((CALL_BEGIN, CALLS_END))
        elif (yield from call_or_text(writer, CALL_BEGIN, call)):
            marker = yield from skip_until((CALL_END, CALL_BEGIN, CALLS_END))
        else:
            marker = CALLS_END


def _call(writer: EventWriter, source: CharacterSource) -> Steps[None]:
    before = (yield from source.until(SEPARATOR, MAX_NAME)).strip()
    inside = (yield from source.until("{", MAX_NAME)).strip()
    name = inside.splitlines()[0].strip() if inside else before
    if not name:
        raise Malformed
    writer.begin_call(name)
    yield from source.json_value("{", writer.arguments)
    writer.complete_arguments()
