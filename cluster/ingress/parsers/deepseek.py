"""DeepSeek-V3 and R1 (`function<sep>name`, then the arguments in a ```json block) and V3.1 (`name<sep>{...}`)."""

from cluster.ingress.parsers.argument_values import Schemas, object_text, to_json
from cluster.ingress.parsers.call_search import CallSearch, behind_call
from cluster.ingress.parsers.character_source import MAX_NAME, CharacterSource, call_or_text
from cluster.ingress.parsers.json_calls import arguments_value, known_name
from cluster.ingress.parsers.json_text import Malformed
from cluster.ingress.parsers.markup_parser import EventWriter, Steps

CALLS_BEGIN, CALLS_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
CALL_BEGIN, CALL_END = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"
SEPARATOR = "<｜tool▁sep｜>"
_NOISE = " \t\r\n}`"


def deepseek_calls(writer: EventWriter, schemas: Schemas) -> Steps[None]:
    def call(source: CharacterSource) -> Steps[None]:
        yield from _call(writer, source, schemas)

    def calls(source: CharacterSource) -> Steps[None]:
        if (yield from source.skip_space()) != CALL_BEGIN[0] or not (
            yield from source.follows(CALL_BEGIN[1:])
        ):
            raise Malformed
        yield from _call(writer, source, schemas)

    search = CallSearch(writer, (CALLS_BEGIN, CALL_BEGIN))
    behind = ""
    while True:
        mark = behind or (yield from search.next())
        found = yield from call_or_text(
            writer, mark, call if mark == CALL_BEGIN else calls, restart=CALL_BEGIN
        )
        behind = ""
        while found is not None:
            behind = yield from behind_call(writer, (CALL_END, CALL_BEGIN, CALLS_END), noise=_NOISE)
            if behind != CALL_END:
                break
        behind = behind if behind == CALL_BEGIN else ""


def _call(writer: EventWriter, source: CharacterSource, schemas: Schemas) -> Steps[None]:
    before = (yield from source.until(SEPARATOR[0], MAX_NAME)).strip()
    if not (yield from source.follows(SEPARATOR[1:])):
        raise Malformed
    first, word = (yield from source.skip_space()), ""
    if first not in '{["`<':
        word, first = yield from _line(source, first)
    if word and (before in ("", "function") or (before not in schemas and word in schemas)):
        before, word = word, ""
    name = known_name(before, schemas)
    if not name:
        raise Malformed
    writer.begin_call(name)
    source.settle()
    tool = schemas.get(name, {})
    if word or first == "<":
        writer.arguments(object_text(to_json(word), tool))
        writer.complete_arguments()
        source.unread(len(first))
    else:
        first = first if not first.isspace() else (yield from source.skip_space())
        first = yield from source.past_fence(first)
        behind = yield from arguments_value(writer, source, first, tool)
        source.unread(len(behind))
    source.settle()


def _line(source: CharacterSource, first: str) -> Steps[tuple[str, str]]:
    """Return the rest of a line, or what stands before an object or a mark, and the first character that is none of it."""
    word, character = first, (yield from source.read())
    while character not in "\n{<":
        word += character
        if len(word) > MAX_NAME:
            raise Malformed
        character = yield from source.read()
    if character.isspace():
        character = yield from source.skip_space()
    return word.strip(), character
