"""The markups that models write, and the parser of each."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal

from cluster.ingress.parsers import deepseek, harmony, hermes, llama, mistral, pythonic
from cluster.ingress.parsers.argument_values import Schemas
from cluster.ingress.parsers.markup_parser import EventWriter, MarkupParser, Steps, plain_text
from cluster.ingress.parsers.output_events import OutputParser, PlainParser
from cluster.ingress.parsers.qwen_coder import qwen_coder_calls
from cluster.ingress.parsers.stop_strings import StopStrings
from cluster.ingress.parsers.thinking import thinking

ToolFormat = Literal[
    "none", "hermes", "qwen3_coder", "llama3_json", "pythonic", "mistral", "deepseek_v3", "harmony"
]
ReasoningFormat = Literal["none", "think", "mistral", "harmony"]

THINK_MARKS: Final[Mapping[str, tuple[str, str]]] = {
    "think": ("<think>", "</think>"),
    "mistral": ("[THINK]", "[/THINK]"),
}
_TOOL_MARKS: Final[Mapping[str, tuple[str, ...]]] = {
    "mistral": (mistral.BEGIN, mistral.ID, mistral.ARGUMENTS),
    "hermes": (hermes.BEGIN, hermes.END),
    "qwen3_coder": (hermes.BEGIN, hermes.END),
    "llama3_json": (llama.PYTHON_TAG,),
    "pythonic": (pythonic.PYTHON_START, pythonic.PYTHON_END),
    "deepseek_v3": (
        *(deepseek.CALLS_BEGIN, deepseek.CALLS_END, deepseek.CALL_BEGIN, deepseek.CALL_END),
        deepseek.SEPARATOR,
    ),
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

    def marks(self, with_tools: bool) -> tuple[str, ...]:
        """Return the markup that a parser must see even where special tokens are left out of the text."""
        if self.is_harmony:
            return _HARMONY_MARKS
        return THINK_MARKS.get(self.reasoning, ()) + (_TOOL_MARKS.get(self.tools, ()) if with_tools else ())


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
        return plain_text(writer) if schemas is None else _calls(formats.tools, writer, schemas)

    if marks is not None:
        return MarkupParser(
            lambda writer: thinking(writer, marks, opened, content),
            max_calls,
            stops,
            text_is_last=schemas is None,
        )
    return PlainParser(stops) if schemas is None else MarkupParser(content, max_calls, stops)


def _calls(tools: ToolFormat, writer: EventWriter, schemas: Schemas) -> Steps[None]:
    match tools:
        case "hermes":
            return hermes.hermes_calls(writer, schemas)
        case "qwen3_coder":
            return qwen_coder_calls(writer, schemas)
        case "llama3_json":
            return llama.llama_json_calls(writer, schemas)
        case "pythonic":
            return pythonic.pythonic_calls(writer, schemas)
        case "mistral":
            return mistral.mistral_calls(writer, schemas)
        case "deepseek_v3":
            return deepseek.deepseek_calls(writer, schemas)
        case "harmony" | "none":
            return plain_text(writer)
