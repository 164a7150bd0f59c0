"""Renders made-up conversations with a model's chat template, to see what it keeps of them and how it writes it."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any, Final

from cluster.ingress.delivery.generator import ChatTokenizer
from cluster.ingress.requests.conversation import ChatMessage, DeclaredTool, MessageCall
from cluster.ingress.templates.chat_messages import IdStyle, MessageStyle, template_messages
from cluster.ingress.templates.message_repairs import AS_IS, Repairs
from core.errors import RequestError

CALLED: Final = "probe_paint"
ARGUMENTS: Final = {"shade": "probe blue", "count": 3}
PARAMETERS: Final = {
    "type": "object",
    "properties": {
        "shade": {"type": "string", "description": "A shade."},
        "count": {"type": "integer", "description": "How many."},
    },
    "required": ["shade", "count"],
}
_SHOWN = "probe_brush"
_TOOL = DeclaredTool(_SHOWN, "Finds a brush.", PARAMETERS).shown
_ID = "call_0123456789abcdef01234567"
ASKED: Final = ChatMessage(role="user", content="probe question")
_TOLD: Final = ChatMessage(role="system", content="probe order")
_CALL = MessageCall(_ID, CALLED, json.dumps(ARGUMENTS))
CALLING: Final = ChatMessage(role="assistant", calls=(_CALL,))
_NAME, _RESULT = "probename", ChatMessage(role="tool", content="probe result", call_id=_ID)


@dataclass(frozen=True, slots=True)
class TemplateUse:
    """One way to use a model's templates."""

    tokenizer: ChatTokenizer
    with_tools: bool
    name: str = ""
    """The template of this name; empty: the one that transformers chooses."""

    def rendered(
        self,
        messages: Sequence[ChatMessage],
        style: MessageStyle,
        repairs: Repairs = AS_IS,
        *,
        adds_prompt: bool = False,
        **arguments: Any,
    ) -> str | None:
        """Return the conversation's text, None where the template refuses it."""
        try:
            return self.tokenizer.render_chat(
                template_messages(messages, style, repairs),
                tools=[_TOOL] if self.with_tools else None,
                add_generation_prompt=adds_prompt,
                template_name=self.name,
                keeps_null=style.null_content,
                **arguments,
            )
        except RequestError:
            return None

    def turn(self, answer: ChatMessage, style: MessageStyle) -> tuple[str, str]:
        """Return the prompt for an answer, and what the template adds to it where the answer is known."""
        prompt = self.rendered([ASKED], style, adds_prompt=True) or ""
        whole = self.rendered([ASKED, answer], style) or ""
        pairs = enumerate(zip(prompt, whole, strict=False))
        shared = next((at for at, (one, other) in pairs if one != other), min(len(prompt), len(whole)))
        shared = _before_mark(whole[:shared])
        return prompt[:shared], whole[shared:]

    def shows_tools(self, style: MessageStyle) -> bool:
        return _SHOWN in (self.rendered([ASKED], style, adds_prompt=True) or "")

    def keeps_calls(self, style: MessageStyle) -> bool:
        text = self.rendered([ASKED, CALLING, _RESULT], style) or ""
        return CALLED in text and str(ARGUMENTS["shade"]) in text

    def puts_system_in_user(self, style: MessageStyle) -> bool:
        """Return whether the system's text is where the user's would begin."""
        told = self.rendered([_TOLD, ASKED], style) or ""
        asked = self.rendered([ASKED], style) or ""
        before, found, _ = told.partition(_TOLD.text)
        return bool(found) and before == asked.partition(ASKED.text)[0]

    def with_names(self, style: MessageStyle) -> MessageStyle:
        """Return the style with what the template does with names."""
        named = [replace(each, name=_NAME) for each in (ASKED, _RESULT)]
        user = self.rendered([named[0]], style) or ""
        tool = self.rendered([ASKED, CALLING, named[1]], style) or ""
        return replace(style, shows_names=_NAME in user, names_results=_NAME in tool)


def _before_mark(text: str) -> int:
    """Return where the text ends, but for a mark that it ends within: another mark may begin with the same letters."""
    for opener, closer in ("<>", "[]"):
        begun = text.rfind(opener)
        if begun >= 0 and closer not in text[begun:] and not any(map(str.isspace, text[begun:])):
            return begun
    return len(text)


def call_styles(plain: MessageStyle, *, short_ids: bool) -> Iterator[MessageStyle]:
    """Yield the styles of calls. Families' own ways are tried first: arguments as an object, and null content."""
    contents = {}, {"text_content": True}, {"null_content": True}
    styles: tuple[IdStyle, ...] = ("short",) if short_ids else ("as_sent", "short", "numbered")
    for ids, content, arguments in product(styles, contents, (False, True)):
        yield replace(plain, ids=ids, text_arguments=arguments, **content)
