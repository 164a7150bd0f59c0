"""A model's chat template: what it makes of a conversation, of which nothing is lost."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Literal

from cluster.ingress.delivery.generator import ChatTokenizer
from cluster.ingress.parsers.model_formats import ModelFormats
from cluster.ingress.requests.conversation import ChatMessage, top_field
from cluster.ingress.templates.chat_messages import MessageStyle, template_messages
from cluster.ingress.templates.format_probe import find_calls, find_reasoning
from cluster.ingress.templates.message_repairs import AS_IS, Repairs, repairs_of
from cluster.ingress.templates.message_shapes import (
    USUAL,
    Mark,
    MessageShape,
    condensed,
    is_usual,
    marked_messages,
    shapes_of,
)
from cluster.ingress.templates.neutral_tools import with_neutral_values
from cluster.ingress.templates.template_probe import TemplateUse, call_styles
from core.config.answer_formats import ReasoningFormat, ToolFormat
from core.errors import RequestError

_FOR_TOOLS = "tool_use"
"""What checkpoints with several templates call the one for tools, and transformers too."""
_KEPT_SHAPES = 256
Tools = Sequence[Mapping[str, Any]] | None


@dataclass(frozen=True, slots=True)
class _Way:
    """One use of the template, and the style of messages that it wants."""

    use: TemplateUse
    style: MessageStyle
    keeps_calls: bool
    keeps_usual: bool
    """Whether it renders all of a usual conversation as it is."""
    puts_system_in_user: bool
    """Whether it puts the system's text into the user's turn: one that comes later would be in a turn that no model has seen."""


class ChatTemplate:
    """Renders with or without tools, each by the template and the style of messages that suit it.

    `formats` is the markup of the model's answers; `problem` says why there is none for calls, as the end of a sentence."""

    def __init__(
        self,
        tokenizer: ChatTokenizer,
        tools: ToolFormat | Literal["auto"],
        reasoning: ReasoningFormat | Literal["auto"],
        *,
        sees: bool,
    ) -> None:
        """`tools` and `reasoning` are the configuration's word, which stands above what is found. `sees`: the model reads
        images."""
        self._tokenizer = tokenizer
        plain, shown = (TemplateUse(tokenizer, with_tools) for with_tools in (False, True))
        style = MessageStyle(text_parts=sees and _demands_parts(tokenizer))
        found_reasoning, style = find_reasoning((shown, plain), style)
        found = find_calls(shown, style, short_ids=tools == "mistral")
        self.formats = ModelFormats(
            found.format if tools == "auto" else tools,
            found_reasoning if reasoning == "auto" else reasoning,
        )
        self.problem = found.problem or "is not used for calls, since model.tool_call_parser is none"
        self._with_tools = _way(shown, found.style, style)
        self._plain = _way(plain, _call_style(plain, style, short_ids=self.short_ids), style)
        self._history = self._plain if self._plain.keeps_calls else self._history_way(plain, style)
        self._repairs = lru_cache(_KEPT_SHAPES)(self._found_repairs)

    @property
    def short_ids(self) -> bool:
        return self._with_tools.style.ids == "short"

    def render(
        self,
        messages: Sequence[ChatMessage],
        tools: Tools,
        arguments: Mapping[str, Any],
        *,
        adds_prompt: bool,
        goes_on: bool,
    ) -> str:
        """Return a conversation's text. `adds_prompt` lets the answer begin behind it, `goes_on` within its last message. Raises
        RequestError where the template refuses it or would lose a part of it."""
        has_calls = any(message.calls for message in messages)
        way = self._with_tools if tools else self._history if has_calls else self._plain
        if has_calls and not way.keeps_calls:
            raise _lossy(messages[0], "this model's chat template renders no tool calls")
        shapes, repairs = shapes_of(messages), AS_IS
        if not (way.keeps_usual and is_usual(shapes)):
            (few, places), said = condensed(shapes), json.dumps(arguments, sort_keys=True)
            repairs, lost = self._repairs(way, few, said, adds_prompt=adds_prompt)
            if lost is not None:
                message = messages[places[lost.at]]
                why = f"{message.place}: this model's chat template would leave out {lost.what}"
                raise _lossy(message, why)
        rendered = template_messages(messages, way.style, repairs)

        def text(tools: Tools) -> str:
            return self._tokenizer.render_chat(
                rendered,
                tools=tools,
                add_generation_prompt=adds_prompt,
                continue_final_message=goes_on,
                template_name=way.use.name,
                keeps_null=way.style.null_content,
                **arguments,
            )

        try:
            return text(tools)
        except RequestError:
            if not tools:
                raise
            return text([with_neutral_values(tool) for tool in tools])

    def _history_way(self, plain: TemplateUse, style: MessageStyle) -> _Way:
        """Return how calls of earlier turns are rendered where the usual template leaves them out: by the one for tools."""
        if _FOR_TOOLS not in self._tokenizer.template_names:
            return self._plain
        named = replace(plain, name=_FOR_TOOLS)
        return _way(named, _call_style(named, style, short_ids=self.short_ids), style)

    @staticmethod
    def _found_repairs(
        way: _Way, shapes: tuple[MessageShape, ...], arguments: str, *, adds_prompt: bool
    ) -> tuple[Repairs, Mark | None]:
        """Return the slightest repairs with which the template keeps all of a conversation of these shapes, or what it would
        lose. One that it refuses in any way is left to it as it is, for its own words."""
        messages, marks = marked_messages(shapes)
        lost_as_is: Mark | None = None
        moves = way.puts_system_in_user and any(shape.role in ("system", "developer") for shape in shapes[1:])
        for repairs in repairs_of(messages):
            if moves and not repairs.system:
                continue
            text = way.use.rendered(
                messages, way.style, repairs, adds_prompt=adds_prompt, **json.loads(arguments)
            )
            lost = next((mark for mark in marks if text is not None and mark.text not in text), None)
            if text is not None and lost is None:
                return repairs, None
            if repairs == AS_IS:
                lost_as_is = lost
        return AS_IS, lost_as_is


def _way(use: TemplateUse, found: MessageStyle | None, plain: MessageStyle) -> _Way:
    style = use.with_names(found or plain)
    return _Way(
        use,
        style,
        keeps_calls=found is not None,
        keeps_usual=_keeps_usual(use, style),
        puts_system_in_user=use.puts_system_in_user(style),
    )


def _call_style(use: TemplateUse, plain: MessageStyle, *, short_ids: bool) -> MessageStyle | None:
    return next((style for style in call_styles(plain, short_ids=short_ids) if use.keeps_calls(style)), None)


def _keeps_usual(use: TemplateUse, style: MessageStyle) -> bool:
    for shapes in USUAL:
        messages, marks = marked_messages(shapes)
        text = use.rendered(messages, style, adds_prompt=True)
        if text is None or any(mark.text not in text for mark in marks):
            return False
    return True


def _demands_parts(tokenizer: ChatTokenizer) -> bool:
    """Return whether the template loses a text that is no list of parts."""
    try:
        return "probe" not in tokenizer.render_chat([{"role": "user", "content": "probe"}])
    except RequestError:
        return True


def _lossy(message: ChatMessage, why: str) -> RequestError:
    return RequestError(why, field=top_field(message.place), code="unsupported_parameter")
