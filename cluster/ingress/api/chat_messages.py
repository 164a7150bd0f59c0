"""Messages as chat templates want them: families differ in what they take calls' arguments and ids for."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain, takewhile
from typing import Any

from cluster.ingress.api.openai_requests import Message, TextPart
from cluster.ingress.api.openai_tools import ToolCall, object_of

_SHORT_ID = 9


@dataclass(frozen=True, slots=True)
class MessageStyle:
    text_arguments: bool = False
    """Whether arguments stay text, as in DeepSeek's template, which joins them with strings."""
    text_content: bool = False
    """Whether null content becomes empty text, for templates that join it with strings."""
    short_ids: bool = False
    """Whether ids have nine letters and digits, as Mistral's templates demand."""
    text_parts: bool = False
    """Whether text stands in a list of parts, as templates of models that read pictures may demand."""
    one_system: bool = False
    """Whether system messages at the beginning become one, for templates that refuse or lose a second."""
    reasoning_key: str = "reasoning_content"
    """The key of the reasoning. gpt-oss's template reads `thinking`."""


def template_messages(messages: Sequence[Message], style: MessageStyle) -> list[dict[str, Any]]:
    """Return the messages in the template's form."""
    out = [_template_message(message, style) for message in messages]
    return _with_one_system(out) if style.one_system else out


def _with_one_system(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    leading = list(takewhile(lambda message: message["role"] == "system", messages))
    if len(leading) < 2:
        return messages
    contents = [message["content"] for message in leading]
    in_parts = any(isinstance(content, list) for content in contents)
    whole = list(chain.from_iterable(contents)) if in_parts else "\n\n".join(contents)
    return [{**leading[0], "content": whole}, *messages[len(leading) :]]


def short_id(call_id: str) -> str:
    return "".join(c for c in call_id if c.isascii() and c.isalnum())[-_SHORT_ID:].rjust(_SHORT_ID, "0")


def _template_message(message: Message, style: MessageStyle) -> dict[str, Any]:
    """Return one message in the template's form. `developer` is OpenAI's newer word for `system`, which templates would drop."""
    content = message.text
    if not content:
        # Some templates take a message for one with calls only where its content is null.
        content = None if message.tool_calls and not style.text_content else ""
    in_parts = message.has_pictures or (style.text_parts and content is not None)
    out: dict[str, Any] = {
        "role": "system" if message.role == "developer" else message.role,
        "content": _template_parts(message) if in_parts else content,
    }
    if message.name is not None:
        out["name"] = message.name
    if message.tool_call_id is not None:
        out["tool_call_id"] = short_id(message.tool_call_id) if style.short_ids else message.tool_call_id
    if message.tool_calls:
        out["tool_calls"] = [_template_call(call, style) for call in message.tool_calls]
    reasoning = message.reasoning_content or message.reasoning
    if reasoning and not (style.reasoning_key == "thinking" and content):
        out[style.reasoning_key] = reasoning
    return out


def _template_parts(message: Message) -> list[dict[str, str]]:
    """Return the text and the places of pictures, as transformers' templates name them."""
    if not isinstance(message.content, list):
        return [{"type": "text", "text": message.content or ""}]
    return [
        {"type": "text", "text": part.text} if isinstance(part, TextPart) else {"type": "image"}
        for part in message.content
    ]


def _template_call(call: ToolCall, style: MessageStyle) -> dict[str, Any]:
    text = call.function.arguments
    arguments = text or "{}" if style.text_arguments else object_of(text)
    return {
        "id": short_id(call.id) if style.short_ids else call.id,
        "type": call.type,
        "function": {"name": call.function.name, "arguments": arguments},
    }
