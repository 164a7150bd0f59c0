"""Messages as chat templates want them: families differ in what they take calls' arguments and ids for."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any, Literal

from cluster.ingress.http.request_json import object_of
from cluster.ingress.requests.conversation import ChatMessage, MessageCall, MessageText
from cluster.ingress.templates.message_repairs import AS_IS, Repairs, repaired

_SHORT_ID = 9
IdStyle = Literal["as_sent", "short", "numbered"]
ReasoningKey = Literal["reasoning_content", "reasoning", "thinking"]


@dataclass(frozen=True, slots=True)
class MessageStyle:
    text_arguments: bool = False
    """Whether arguments stay text, as in DeepSeek's template, which joins them with strings."""
    text_content: bool = False
    """Whether null content becomes empty text, for templates that join it with strings."""
    null_content: bool = False
    """Whether null content is null to the template, which DeepSeek's asks for. transformers leaves the key out."""
    ids: IdStyle = "as_sent"
    """`short`: nine letters and digits, as Mistral's templates demand. `numbered`: `functions.NAME:0`, counted through the
    conversation: Kimi's templates render the id alone, and the model reads the name in it."""
    text_parts: bool = False
    """Whether text stands in a list of parts, as templates of models that read images may demand."""
    reasoning_key: ReasoningKey = "reasoning_content"
    """The key of the reasoning. gpt-oss's template reads `thinking`."""
    shows_names: bool = True
    """Whether the template renders `name`. Otherwise names that tell messages of a role apart go before their text."""
    names_results: bool = False
    """Whether the template renders the name of the tool with its result. A client may leave it out."""


def template_messages(
    messages: Sequence[ChatMessage], style: MessageStyle, repairs: Repairs = AS_IS
) -> list[dict[str, Any]]:
    """Return the messages in the template's form."""
    parted = _with_ids(repaired(messages, repairs), style.ids)
    names = {call.id: call.name for message in parted for call in message.calls}
    out = [_template_message(message, style, names) for message in parted]
    if not style.shows_names:
        _put_names_into_texts(out)
    return _with_one_system(out, into_user=repairs.system == "in_user") if repairs.system else out


def _with_ids(messages: Sequence[ChatMessage], style: IdStyle) -> Sequence[ChatMessage]:
    """Return the messages with ids in the style. A result has the id of the last call before it that had the same one."""
    if style == "as_sent":
        return messages
    out: list[ChatMessage] = []
    written: dict[str, str] = {}
    num_calls = 0
    for message in messages:
        calls: list[MessageCall] = []
        for call in message.calls:
            numbered = f"functions.{call.name}:{num_calls}"
            written[call.id] = short_id(call.id) if style == "short" else numbered
            calls.append(replace(call, id=written[call.id]))
            num_calls += 1
        if (answered := message.call_id) is not None:
            answered = written.get(answered) or (short_id(answered) if style == "short" else answered)
        out.append(replace(message, calls=tuple(calls), call_id=answered))
    return out


def _put_names_into_texts(messages: list[dict[str, Any]]) -> None:
    """Put names before the texts of a role that several names are given to."""
    for role in ("system", "user", "assistant"):
        named = [message for message in messages if message["role"] == role and message.get("name")]
        if len({message["name"] for message in named}) > 1:
            for message in named:
                message["content"] = _behind(f"{message['name']}: ", message["content"])


def _behind(text: str, content: Any) -> Any:
    """Return a message's content with `text` before it."""
    return [{"type": "text", "text": text}, *content] if isinstance(content, list) else text + (content or "")


def _with_one_system(messages: list[dict[str, Any]], *, into_user: bool) -> list[dict[str, Any]]:
    """Return the messages with all system texts in one message at the beginning, or in the first message of the user."""
    systems = [message for message in messages if message["role"] == "system"]
    others = [message for message in messages if message["role"] != "system"]
    contents = [message["content"] for message in systems]
    first_user = next((at for at, message in enumerate(others) if message["role"] == "user"), None)
    if not into_user or first_user is None:
        return [{**systems[0], "content": _joined(contents)}, *others]
    asked = others[first_user]
    told = {**asked, "content": _joined([*contents, asked["content"]])}
    return [*others[:first_user], told, *others[first_user + 1 :]]


def _joined(contents: Sequence[Any]) -> Any:
    """Return several messages' contents as one: text, or parts where any has them."""
    if not any(isinstance(content, list) for content in contents):
        return "\n\n".join(contents)
    between = [{"type": "text", "text": "\n\n"}]
    lists = [
        content if isinstance(content, list) else [{"type": "text", "text": content}] for content in contents
    ]
    joined = list(chain.from_iterable(chain.from_iterable((between, each) for each in lists)))[1:]
    return _with_texts_joined(joined)


def _with_texts_joined(parts: Sequence[Mapping[str, str]]) -> list[dict[str, str]]:
    """Return the parts with neighbouring texts made one: a template may read the first of them alone."""
    out: list[dict[str, str]] = []
    for part in parts:
        if out and part["type"] == out[-1]["type"] == "text":
            out[-1] = {"type": "text", "text": out[-1]["text"] + part["text"]}
        else:
            out.append(dict(part))
    return out


def short_id(call_id: str) -> str:
    return "".join(c for c in call_id if c.isascii() and c.isalnum())[-_SHORT_ID:].rjust(_SHORT_ID, "0")


def _template_message(message: ChatMessage, style: MessageStyle, names: Mapping[str, str]) -> dict[str, Any]:
    """Return one message in the template's form. `developer` is OpenAI's newer word for `system`, which templates would drop.
    `names` are of the tools that were called, by the call's id."""
    content: str | None = message.text
    if not content:
        # Some templates take a message for one with calls only where its content is null.
        content = None if message.calls and not style.text_content else ""
    in_parts = message.has_images or (style.text_parts and content is not None)
    out: dict[str, Any] = {
        "role": "system" if message.role == "developer" else message.role,
        "content": _template_parts(message) if in_parts else content,
    }
    if message.name is not None:
        out["name"] = message.name
    elif style.names_results and (name := names.get(message.call_id or "")):
        out["name"] = name
    if message.call_id is not None:
        out["tool_call_id"] = message.call_id
    if message.calls:
        out["tool_calls"] = [_template_call(call, style) for call in message.calls]
    if message.reasoning and not (style.reasoning_key == "thinking" and content):
        out[style.reasoning_key] = message.reasoning
    return out


def _template_parts(message: ChatMessage) -> list[dict[str, str]]:
    """Return the text and the places of images, as transformers' templates name them."""
    return [
        {"type": "text", "text": part.text} if isinstance(part, MessageText) else {"type": "image"}
        for part in message.parts
    ]


def _template_call(call: MessageCall, style: MessageStyle) -> dict[str, Any]:
    text = call.arguments
    arguments = text or "{}" if style.text_arguments else object_of(text)
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": arguments}}
