"""Conversations without their words: what a template keeps of one depends on its shape, and is tried with marks for texts."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count
from typing import Final, Literal

from cluster.ingress.api.openai_requests import ImagePart, ImageUrl, Message, TextPart
from cluster.ingress.api.openai_tools import CalledFunction, ToolCall

Role = Literal["system", "developer", "user", "assistant", "tool"]
_UNKNOWN: Final = -1
_WORDS: Final = {
    "system": "a system message",
    "developer": "a developer's message",
    "user": "the user's text",
    "assistant": "the assistant's text",
    "tool": "a tool's result",
}


@dataclass(frozen=True, slots=True)
class MessageShape:
    """One message."""

    role: Role
    parts: str = ""
    """A letter for each part: text or image. Empty: there is no text."""
    num_calls: int = 0
    answers: int = _UNKNOWN
    """Which of the conversation's calls a result is of."""
    reasons: bool = False


@dataclass(frozen=True, slots=True)
class Mark:
    """A text of the marked messages that must be in what the template makes of them."""

    text: str
    at: int
    """The message."""
    what: str
    """What would be lost with it."""


USUAL: Final = (
    (
        MessageShape("system", "t"),
        MessageShape("user", "t"),
        MessageShape("assistant", "t"),
        MessageShape("user", "t"),
    ),
    (MessageShape("user", "t"), MessageShape("assistant", "t"), MessageShape("user", "t")),
)


def is_usual(shapes: Sequence[MessageShape]) -> bool:
    """Return whether a conversation is like one of the usual ones, only longer or shorter."""
    turns = shapes[1:] if shapes[0] == USUAL[0][0] else shapes
    expected = (MessageShape("user", "t"), MessageShape("assistant", "t"))
    return bool(turns) and all(shape == expected[at % 2] for at, shape in enumerate(turns))


def shapes_of(messages: Sequence[Message]) -> tuple[MessageShape, ...]:
    calls = [call.id for message in messages for call in message.tool_calls or ()]
    numbers = {call_id: number for number, call_id in enumerate(calls)}
    return tuple(
        MessageShape(
            role=message.role,
            parts=_parts(message),
            num_calls=len(message.tool_calls or ()),
            answers=numbers.get(message.tool_call_id or "", _UNKNOWN),
            reasons=bool(message.reasoning_content or message.reasoning),
        )
        for message in messages
    )


def _parts(message: Message) -> str:
    if not isinstance(message.content, list) or not message.has_pictures:
        return "t" if (message.text or "").strip() else ""
    parts = message.content
    letters = ["i" if isinstance(part, ImagePart) else "t" if part.text.strip() else "" for part in parts]
    return "".join(letters)


def marked_messages(shapes: Sequence[MessageShape]) -> tuple[list[Message], list[Mark]]:
    """Return messages of these shapes with a mark in place of each text, and the marks that must not be lost."""
    numbers, calls = count(), count()
    messages: list[Message] = []
    marks: list[Mark] = []

    def mark(at: int, what: str) -> str:
        marks.append(Mark(f"zq{next(numbers):06d}zq", at, what))
        return marks[-1].text

    for at, shape in enumerate(shapes):
        texts = [mark(at, _WORDS[shape.role]) if part == "t" else None for part in shape.parts]
        made = [_call(next(calls), mark(at, "a call"), mark(at, "a call")) for _ in range(shape.num_calls)]
        messages.append(
            Message(
                role=shape.role,
                content=_content(texts) or (None if made else ""),
                tool_calls=made or None,
                tool_call_id=_id(shape.answers) if shape.role == "tool" else None,
                reasoning_content="thought" if shape.reasons else None,
            )
        )
    return messages, marks


def _content(texts: Sequence[str | None]) -> str | list[TextPart | ImagePart]:
    """Return a message's content. None stands for a picture."""
    if None not in texts:
        return "".join(text or "" for text in texts)
    picture = ImagePart(type="image_url", image_url=ImageUrl(url="data:,"))
    return [picture if text is None else TextPart(type="text", text=text) for text in texts]


def _call(number: int, name: str, value: str) -> ToolCall:
    function = CalledFunction(name=name, arguments=json.dumps({"probe": value}))
    return ToolCall(id=_id(number), function=function)


def _id(number: int) -> str:
    """Return an id of nine letters and digits, which all templates take."""
    return f"call{number % 100_000:05d}"
