"""Finds the markup that a model writes: the template renders a known answer, and the parser that reads it back is the model's."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product, takewhile
from typing import Final

from cluster.ingress.parsers import harmony
from cluster.ingress.parsers.call_formats import CALL_FORMATS
from cluster.ingress.parsers.model_formats import THINK_MARKS, ModelFormats, make_parser
from cluster.ingress.parsers.output_events import (
    CallArguments,
    CallBegins,
    OutputEvent,
    Reasoning,
    Text,
    joined,
)
from cluster.ingress.requests.conversation import ChatMessage
from cluster.ingress.templates.chat_messages import MessageStyle, ReasoningKey
from cluster.ingress.templates.template_probe import (
    ARGUMENTS,
    ASKED,
    CALLED,
    CALLING,
    PARAMETERS,
    TemplateUse,
    call_styles,
)
from core.config.answer_formats import ReasoningFormat, ToolFormat

_TOOL_FORMATS: Final[tuple[ToolFormat, ...]] = ("harmony", *CALL_FORMATS)
_OPENINGS: Final[Mapping[ToolFormat, str]] = {
    "harmony": harmony.CHANNEL,
    **{name: each.opening for name, each in CALL_FORMATS.items() if each.opening},
}
_MARKED: Final[tuple[ReasoningFormat, ...]] = tuple(THINK_MARKS)
_REASONING_FORMATS: Final[tuple[ReasoningFormat, ...]] = ("harmony", *_MARKED)
_BEFORE_CALLS: Final[tuple[ReasoningFormat, ...]] = ("none", *_MARKED)
_REASONING_KEYS: Final[tuple[ReasoningKey, ...]] = ("reasoning_content", "thinking", "reasoning")
_REASONING_SIGNS: Final[Mapping[str, ReasoningFormat]] = {
    harmony.CHANNEL: "harmony",
    "[THINK]": "mistral",
    **{end: name for name, (_, end) in THINK_MARKS.items() if name != "mistral"},
}
"""What only a template of the family has in it, where it renders no reasoning of earlier turns."""
_PYTHONIC_SIGN: Final = "[func_name1("
"""Llama's templates that ask for Python, and render earlier calls as JSON all the same."""
_THOUGHT: Final = "probe thought"
_THINKING: Final = (
    ChatMessage(role="assistant", content="probe answer", reasoning=_THOUGHT),
    replace(CALLING, reasoning=_THOUGHT),
)


@dataclass(frozen=True, slots=True)
class FoundCalls:
    """How a template writes calls."""

    format: ToolFormat
    style: MessageStyle | None
    """None where it leaves calls out."""
    problem: str = ""
    """Why there is no format, as a sentence about the template."""


def find_calls(use: TemplateUse, plain: MessageStyle, *, short_ids: bool) -> FoundCalls:
    """Find the format of calls, and the style of messages in which the template renders them."""
    kept = [style for style in call_styles(plain, short_ids=short_ids) if use.keeps_calls(style)]
    if not use.shows_tools(plain):
        return FoundCalls("none", kept[0] if kept else None, "shows the model no tools")
    if not kept:
        return FoundCalls("none", None, "leaves calls out of a conversation")
    for style in kept:
        _, written = use.turn(CALLING, style)
        found = _format_of(written)
        if found == "mistral":
            return FoundCalls(found, replace(style, ids="short"))
        if found is not None:
            asks_for_python = found == "llama3_json" and _PYTHONIC_SIGN in use.tokenizer.template
            return FoundCalls("pythonic" if asks_for_python else found, style)
    return FoundCalls("none", kept[0], "writes calls in a format that Baton cannot read")


def find_reasoning(uses: Sequence[TemplateUse], plain: MessageStyle) -> tuple[ReasoningFormat, MessageStyle]:
    """Find the marks of reasoning, and the style in which the template renders that of earlier turns.

    Many templates leave it out. Then the prompt's end decides, or the only sign in the template's source."""
    for use, key, answer in product(uses, _REASONING_KEYS, _THINKING):
        style = replace(plain, reasoning_key=key)
        prompt, written = use.turn(answer, style)
        if _THOUGHT in written:
            found = _begun(uses, plain) or _reasoning_of(prompt, written)
            # transformers may give gpt-oss's template its key by itself.
            return found, replace(style, reasoning_key="thinking") if found == "harmony" else style
    return _begun(uses, plain) or _signed(uses[0].tokenizer.template), plain


def _format_of(written: str) -> ToolFormat | None:
    """Return the format whose parser reads the known call in a turn, and leaves nothing of it."""
    for tools, reasoning in product(_TOOL_FORMATS, _BEFORE_CALLS):
        if _OPENINGS.get(tools, "") not in written:
            continue
        events = _events(ModelFormats(tools, reasoning), written, opened=False)
        names = [event.name for event in events if isinstance(event, CallBegins)]
        arguments = "".join(event.text for event in events if isinstance(event, CallArguments))
        rest = "".join(event.text for event in events if isinstance(event, Text))
        is_whole = CALLED not in rest and str(ARGUMENTS["shade"]) not in rest
        leads = tools in _OPENINGS or not _text_before_calls(events).strip()
        if names == [CALLED] and is_whole and leads and _object(arguments) == ARGUMENTS:
            return tools
    return None


def _text_before_calls(events: Sequence[OutputEvent]) -> str:
    before = takewhile(lambda event: not isinstance(event, CallBegins), events)
    return "".join(event.text for event in before if isinstance(event, Text))


def _reasoning_of(prompt: str, written: str) -> ReasoningFormat:
    """Return the format whose parser reads the known reasoning in a turn; `none` where no parser does."""
    for name in _REASONING_FORMATS:
        begin = THINK_MARKS.get(name, ("",))[0]
        opened = bool(begin) and prompt.rstrip().endswith(begin)
        events = _events(ModelFormats("none", name), written, opened=opened)
        thoughts = [event.text.strip() for event in events if isinstance(event, Reasoning)]
        texts = [event.text for event in events if isinstance(event, Text)]
        if thoughts == [_THOUGHT] and _THOUGHT not in "".join(texts):
            return name
    return "none"


def _begun(uses: Sequence[TemplateUse], plain: MessageStyle) -> ReasoningFormat | None:
    """Return the format of the reasoning that a prompt ends within."""
    for use in uses:
        prompt = (use.rendered([ASKED], plain, adds_prompt=True) or "").rstrip()
        for name in _MARKED:
            if prompt.endswith(THINK_MARKS[name][0]):
                return name
    return None


def _signed(template: str) -> ReasoningFormat:
    found: list[ReasoningFormat] = [name for sign, name in _REASONING_SIGNS.items() if sign in template]
    return found[0] if len(found) == 1 else "none"


def _events(formats: ModelFormats, text: str, *, opened: bool) -> list[OutputEvent]:
    schemas = None if formats.tools == "none" else {CALLED: PARAMETERS}
    parser = make_parser(formats, schemas=schemas, opened=opened)
    return joined([*parser.push(text), *parser.finish()])


def _object(text: str) -> object:
    try:
        return json.loads(text)
    except ValueError:
        return None
