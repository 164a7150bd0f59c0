"""Calls as a name, a separator and a JSON object, between marks: DeepSeek-V3 and R1 (`function<sep>name`, then the arguments in a
```json block), V3.1 (`name<sep>{...}`), Kimi K2 (`functions.name:0<sep>{...}`), Hunyuan."""

import re
from dataclasses import dataclass

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
_NUMBER = re.compile(r":\d+$")


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedCallMarks:
    calls_begin: str
    calls_end: str
    call_begin: str
    call_end: str
    separator: str
    is_numbered: bool = False
    """Whether names are those of ids, `functions.name:0`."""
    is_fenced: bool = False
    """Whether the arguments stand in a block of code."""
    may_be_typed: bool = False
    """Whether some templates write `function` before the name, and the arguments in a block of code."""

    @property
    def every(self) -> tuple[str, ...]:
        marks = (self.calls_begin, self.calls_end, self.call_begin, self.call_end, self.separator)
        return tuple(mark for mark in marks if mark.strip())


DEEPSEEK = NamedCallMarks(
    calls_begin=CALLS_BEGIN,
    calls_end=CALLS_END,
    call_begin=CALL_BEGIN,
    call_end=CALL_END,
    separator=SEPARATOR,
    may_be_typed=True,
)
KIMI_K2 = NamedCallMarks(
    calls_begin="<|tool_calls_section_begin|>",
    calls_end="<|tool_calls_section_end|>",
    call_begin="<|tool_call_begin|>",
    call_end="<|tool_call_end|>",
    separator="<|tool_call_argument_begin|>",
    is_numbered=True,
)
HUNYUAN = NamedCallMarks(
    calls_begin="<tool_calls>",
    calls_end="</tool_calls>",
    call_begin="<tool_call>",
    call_end="</tool_call>",
    separator="\n",
    is_fenced=True,
)


def named_calls(writer: EventWriter, schemas: Schemas, marks: NamedCallMarks) -> Steps[None]:
    begin = marks.call_begin

    def call(source: CharacterSource) -> Steps[None]:
        yield from _call(writer, source, schemas, marks)

    def calls(source: CharacterSource) -> Steps[None]:
        if (yield from source.skip_space()) != begin[0] or not (yield from source.follows(begin[1:])):
            raise Malformed
        yield from _call(writer, source, schemas, marks)

    search = CallSearch(writer, (marks.calls_begin, begin))
    behind = ""
    while True:
        mark = behind or (yield from search.next())
        found = yield from call_or_text(writer, mark, call if mark == begin else calls, restart=begin)
        behind = ""
        while found is not None:
            behind = yield from behind_call(writer, (marks.call_end, begin, marks.calls_end), noise=_NOISE)
            if behind != marks.call_end:
                break
        behind = behind if behind == begin else ""


def _call(
    writer: EventWriter, source: CharacterSource, schemas: Schemas, marks: NamedCallMarks
) -> Steps[None]:
    before = (yield from source.until(marks.separator[0], MAX_NAME)).strip()
    if not (yield from source.follows(marks.separator[1:])):
        raise Malformed
    first, word = (yield from source.skip_space()), ""
    if first not in '{["`<':
        word, first = yield from _line(source, first)
    if word and (before in ("", "function") or (before not in schemas and word in schemas)):
        before, word = word, ""
    name = _name(before, schemas) if marks.is_numbered else known_name(before, schemas)
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


def _name(written: str, schemas: Schemas) -> str:
    """Return the tool's name of an id such as `functions.name:0`."""
    if written in schemas:
        return written
    return known_name(_NUMBER.sub("", written).removeprefix("functions."), schemas)


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
