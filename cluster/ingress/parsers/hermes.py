"""Calls as JSON objects between two marks: `<tool_call>` and `</tool_call>` around each `{"name": "f", "arguments": {...}}` of
Hermes and Qwen, and other families' marks around a list of them."""

from dataclasses import dataclass

from cluster.ingress.parsers.argument_values import Schemas
from cluster.ingress.parsers.call_search import NOISE, CallSearch, behind_call, unmarked_objects
from cluster.ingress.parsers.character_source import FENCE, CharacterSource, call_or_text
from cluster.ingress.parsers.json_calls import call_object, named_object
from cluster.ingress.parsers.json_text import Malformed
from cluster.ingress.parsers.markup_parser import EventWriter, Steps

BEGIN, END = "<tool_call>", "</tool_call>"


@dataclass(frozen=True, slots=True, kw_only=True)
class JsonCallMarks:
    begin: str
    end: str = ""
    listed: bool = True
    """Whether all calls of a turn are one list between the marks."""
    lead: str = "["
    """What stands before the first object, behind it, and between two of a list."""
    trail: str = "]"
    between: str = ", "
    id_key: str = ""
    """The key of a call's number, where calls have one."""
    name_key: str = "name"
    """Empty: an object has one member, the name with the arguments."""
    arguments_key: str = "arguments"

    @property
    def ends(self) -> tuple[str, ...]:
        return (self.end,) if self.end else ("]",)

    @property
    def noise(self) -> str:
        """Return what may stand before an end without being one."""
        return NOISE if self.end else NOISE.replace("]", "")

    @property
    def every(self) -> tuple[str, ...]:
        return tuple(filter(None, (self.begin, self.end)))


HERMES = JsonCallMarks(begin=BEGIN, end=END, listed=False, lead="\n", trail="\n")
APERTUS = JsonCallMarks(begin="<|tools_prefix|>", end="<|tools_suffix|>", name_key="")
JAMBA = JsonCallMarks(begin="<tool_calls>", end="</tool_calls>")
GRANITE = JsonCallMarks(begin="<|tool_call|>")
PHI_4_MINI = JsonCallMarks(begin="<|tool_call|>", end="<|/tool_call|>")
NEMOTRON = JsonCallMarks(begin="<TOOLCALL>", end="</TOOLCALL>")
INTERNLM = JsonCallMarks(
    begin="<|action_start|><|plugin|>",
    end="<|action_end|>",
    listed=False,
    lead="\n",
    trail="",
    arguments_key="parameters",
)
COHERE = JsonCallMarks(
    begin="<|START_ACTION|>",
    end="<|END_ACTION|>",
    lead="[\n    ",
    trail="\n]",
    between=",\n    ",
    id_key="tool_call_id",
    name_key="tool_name",
    arguments_key="parameters",
)


def json_calls(writer: EventWriter, schemas: Schemas, marks: JsonCallMarks) -> Steps[None]:
    begin = marks.begin

    def marked(source: CharacterSource) -> Steps[None]:
        first = yield from source.past_fence((yield from source.skip_space()))
        if first == "[":
            first = yield from source.skip_space()
        if first != "{":
            raise Malformed
        yield from following(source)

    def following(source: CharacterSource) -> Steps[None]:
        read = call_object if marks.name_key else named_object
        yield from read(writer, source, schemas)

    def unmarked(source: CharacterSource) -> Steps[None]:
        yield from unmarked_objects(writer, source, schemas, mark, marks.end)

    search = CallSearch(writer, (begin,), on_lines="{[" if marks.listed else "{")
    mark = ""
    while True:
        mark = mark or (yield from search.next())
        found = yield from call_or_text(writer, mark, marked if mark == begin else unmarked, restart=begin)
        mark = ""
        while found is not None:
            fences = (FENCE,) if found.is_fenced else ()
            ends = (*marks.ends, begin, *fences)
            behind = yield from behind_call(writer, ends, more="{", noise=marks.noise)
            if behind == "{":
                found = yield from call_or_text(writer, "{", following, restart=begin)
            elif behind != FENCE:
                mark = behind if behind == begin else ""
                break
        search.at_line_start = found is not None
