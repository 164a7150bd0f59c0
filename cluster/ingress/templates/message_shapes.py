"""Conversations without their words: what a template keeps of one depends on its shape, and is tried with marks for texts."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Final

from cluster.ingress.requests.conversation import (
    ChatMessage,
    MessageCall,
    MessageImage,
    MessageText,
    Part,
    Role,
)
from cluster.ingress.tenants.pieces import between_pieces

_LONGEST_ROUND, _KEPT_ROUNDS = 6, 4
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
    answers: int = 0
    """Which call before it a result is of, counted backwards from 1; 0: of none that is known."""
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


def shapes_of(messages: Sequence[ChatMessage]) -> tuple[MessageShape, ...]:
    calls: dict[str, int] = {}
    num_calls = 0
    shapes: list[MessageShape] = []
    for message in messages:
        between_pieces()
        called = calls.get(message.call_id or "")
        shapes.append(
            MessageShape(
                role=message.role,
                parts=_parts(message),
                num_calls=len(message.calls),
                answers=0 if called is None else num_calls - called,
                reasons=bool(message.reasoning),
            )
        )
        for call in message.calls:
            calls[call.id], num_calls = num_calls, num_calls + 1
    return tuple(shapes)


def condensed(shapes: Sequence[MessageShape]) -> tuple[tuple[MessageShape, ...], tuple[int, ...]]:
    """Return the shapes with few of many equal rounds, and where each was. An agent's long loop is as its first rounds are, so
    that its next turn need not be tried again. As many rounds are left as make the number even or odd as it was."""
    kept: list[int] = []
    at = 0
    while at < len(shapes):
        size, count = next(_rounds(shapes, at), (1, 1))
        left = min(count, _KEPT_ROUNDS + count % 2)
        kept += range(at, at + size * left)
        at += size * count
    return tuple(shapes[index] for index in kept), tuple(kept)


def _rounds(shapes: Sequence[MessageShape], at: int) -> Iterator[tuple[int, int]]:
    """Yield the size of each round that is repeated often from `at` on, and how often it is there."""
    for size in range(1, _LONGEST_ROUND + 1):
        count, first = 1, shapes[at : at + size]
        while shapes[at + size * count : at + size * (count + 1)] == first:
            count += 1
        if count > _KEPT_ROUNDS + 1:
            yield size, count


def _parts(message: ChatMessage) -> str:
    parts = message.parts
    letters = ["i" if isinstance(part, MessageImage) else "t" if part.text.strip() else "" for part in parts]
    return "".join(letters)


def marked_messages(shapes: Sequence[MessageShape]) -> tuple[list[ChatMessage], list[Mark]]:
    """Return messages of these shapes with a mark instead of each text, and the marks that must not be lost."""
    numbers, num_calls = count(), 0
    messages: list[ChatMessage] = []
    marks: list[Mark] = []

    def mark(at: int, what: str) -> str:
        marks.append(Mark(f"zq{next(numbers):06d}zq", at, what))
        return marks[-1].text

    for at, shape in enumerate(shapes):
        texts = [mark(at, _WORDS[shape.role]) if part == "t" else None for part in shape.parts]
        made = [
            _call(num_calls + number, mark(at, "a call"), mark(at, "a call"))
            for number in range(shape.num_calls)
        ]
        messages.append(
            ChatMessage(
                role=shape.role,
                content=_content(texts),
                calls=tuple(made),
                call_id=_id(num_calls - shape.answers) if shape.role == "tool" else None,
                reasoning="thought" if shape.reasons else "",
            )
        )
        num_calls += shape.num_calls
    return messages, marks


def _content(texts: Sequence[str | None]) -> str | tuple[Part, ...]:
    """Return a message's content. None stands for an image."""
    if None not in texts:
        return "".join(text or "" for text in texts)
    return tuple(MessageImage("data:,") if text is None else MessageText(text) for text in texts)


def _call(number: int, name: str, value: str) -> MessageCall:
    return MessageCall(_id(number), name, json.dumps({"probe": value}))


def _id(number: int) -> str:
    """Return an id of nine letters and digits, which all templates take."""
    return f"call{number % 100_000:05d}"
