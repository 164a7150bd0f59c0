"""The markups that models write, and the parser of each."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from cluster.ingress.parsers import harmony
from cluster.ingress.parsers.argument_values import Schemas
from cluster.ingress.parsers.call_formats import CALL_FORMATS
from cluster.ingress.parsers.markup_parser import EventWriter, MarkupParser, Steps, plain_text
from cluster.ingress.parsers.output_events import OutputParser, PlainParser
from cluster.ingress.parsers.stop_strings import StopStrings
from cluster.ingress.parsers.thinking import thinking
from core.config.answer_formats import ReasoningFormat, ToolFormat

THINK_MARKS: Final[Mapping[ReasoningFormat, tuple[str, str]]] = {
    "think": ("<think>", "</think>"),
    "mistral": ("[THINK]", "[/THINK]"),
    "seed_oss": ("<seed:think>", "</seed:think>"),
    "cohere": ("<|START_THINKING|>", "<|END_THINKING|>"),
    "hy_v3_open": ("<think:opensource>", "</think:opensource>"),
    "apertus": ("<|inner_prefix|>", "<|inner_suffix|>"),
    "gemma4": ("<|channel>thought", "<channel|>"),
}
_HARMONY_MARKS = (
    *(harmony.START, harmony.CHANNEL, harmony.CONSTRAIN, harmony.MESSAGE),
    *(harmony.END, harmony.CALL, harmony.RETURN),
)


@dataclass(frozen=True, slots=True)
class ModelFormats:
    tools: ToolFormat
    reasoning: ReasoningFormat

    @property
    def is_harmony(self) -> bool:
        return "harmony" in (self.tools, self.reasoning)

    @property
    def budget_marks(self) -> tuple[str, str, str]:
        """Return what begins reasoning, what ends it, and what is forced when it must end; empty where there is none."""
        if self.is_harmony:
            return harmony.ANALYSIS, harmony.END, harmony.END + harmony.FINAL
        begin, end = THINK_MARKS.get(self.reasoning, ("", ""))
        return begin, end, end

    def marks(self, *, with_tools: bool) -> tuple[str, ...]:
        """Return the markup that a parser must see even where special tokens are left out of the text."""
        if self.is_harmony:
            return _HARMONY_MARKS
        of_calls = CALL_FORMATS[self.tools].marks if with_tools and self.tools in CALL_FORMATS else ()
        return (*THINK_MARKS.get(self.reasoning, ()), *of_calls)


def make_parser(
    formats: ModelFormats,
    *,
    schemas: Schemas | None,
    opened: bool,
    max_calls: int | None = None,
    stops: StopStrings | None = None,
) -> OutputParser:
    """Make a parser for one sequence. `schemas` are of the tools that may be called, None where calls are text. `opened` says
    that the prompt ends within the reasoning. `stops` end its text."""
    if formats.is_harmony:
        return MarkupParser(lambda writer: harmony.harmony_output(writer, schemas), max_calls, stops)
    marks = THINK_MARKS.get(formats.reasoning)

    def content(writer: EventWriter) -> Steps[None]:
        tools = CALL_FORMATS.get(formats.tools)
        return plain_text(writer) if schemas is None or tools is None else tools.read(writer, schemas)

    if marks is not None:
        return MarkupParser(
            lambda writer: thinking(writer, marks, content, opened=opened),
            max_calls,
            stops,
            text_is_last=schemas is None,
        )
    return PlainParser(stops) if schemas is None else MarkupParser(content, max_calls, stops)
