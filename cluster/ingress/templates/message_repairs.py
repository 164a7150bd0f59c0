"""What is done to messages that a chat template would refuse or lose as they are. Nothing of them is left out."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise, product
from typing import Literal

from cluster.ingress.requests.conversation import ChatMessage

SystemPlace = Literal["", "first", "in_user"]


@dataclass(frozen=True, slots=True)
class Repairs:
    system: SystemPlace = ""
    """Where all system texts go: one message at the beginning, or the user's first message."""
    calls_apart: bool = False
    """Whether each message has one call at the most, with its result right behind it."""
    text_apart: bool = False
    """Whether an assistant's text has a message of its own before the calls beside it."""
    one_turn: bool = False
    """Whether neighbouring texts of one role become one message."""

    @property
    def count(self) -> int:
        return bool(self.system) + self.calls_apart + self.text_apart + self.one_turn


AS_IS = Repairs()


def repairs_of(messages: Sequence[ChatMessage]) -> list[Repairs]:
    """Return all repairs that would change these messages, the slightest first."""
    systems = [at for at, message in enumerate(messages) if _is_system(message)]
    with_calls = [message for message in messages if message.calls]
    places: tuple[SystemPlace, ...] = ("",)
    if systems:
        places = ("", "first", "in_user") if systems != [0] else ("", "in_user")
    every = product(
        places,
        (False, True) if any(len(message.calls) > 1 for message in with_calls) else (False,),
        (False, True) if any(message.text for message in with_calls) else (False,),
        (False, True) if _has_neighbours(messages) else (False,),
    )
    return sorted((Repairs(*each) for each in every), key=lambda each: (each.count, each.system == "in_user"))


def repaired(messages: Sequence[ChatMessage], repairs: Repairs) -> list[ChatMessage]:
    """Return the messages after all repairs but that of system texts."""
    out = list(messages)
    if repairs.text_apart:
        out = [part for message in out for part in _text_apart(message)]
    if repairs.calls_apart:
        out = list(_calls_apart(out))
    return _with_one_turn(out, across_systems=bool(repairs.system)) if repairs.one_turn else out


def _is_system(message: ChatMessage) -> bool:
    return message.role in ("system", "developer")


def _is_plain(message: ChatMessage) -> bool:
    return message.role in ("user", "assistant") and not message.calls


def _has_neighbours(messages: Sequence[ChatMessage]) -> bool:
    others = [message for message in messages if not _is_system(message)]
    return any(_go_together(*pair) for pair in pairwise(others))


def _go_together(one: ChatMessage, other: ChatMessage) -> bool:
    return _is_plain(one) and _is_plain(other) and one.role == other.role and one.name == other.name


def _text_apart(message: ChatMessage) -> list[ChatMessage]:
    """Return the text and the calls apart. Reasoning stays with the calls: gpt-oss's template leaves out that of texts."""
    if not (message.calls and message.text):
        return [message]
    return [replace(message, calls=(), reasoning=""), replace(message, content="")]


def _calls_apart(messages: Sequence[ChatMessage]) -> Iterator[ChatMessage]:
    """Yield the messages with each call in one of its own. The results that follow are put behind their calls."""
    left = list(messages)
    while left:
        message = left.pop(0)
        if len(calls := message.calls) < 2:
            yield message
            continue
        num_results = next((n for n, other in enumerate(left) if other.role != "tool"), len(left))
        results, left = left[:num_results], left[num_results:]
        for call in calls:
            yield replace(message, calls=(call,))
            message = replace(message, content="", reasoning="")
            yield from (result for result in results if result.call_id == call.id)
        ids = {call.id for call in calls}
        yield from (result for result in results if result.call_id not in ids)


def _with_one_turn(messages: Sequence[ChatMessage], *, across_systems: bool) -> list[ChatMessage]:
    """Return the messages with neighbouring texts of one role joined. `across_systems`: system messages, which will be moved,
    may stand between them."""
    out: list[ChatMessage] = []
    for message in messages:
        places = reversed(range(len(out)))
        last = next((at for at in places if not (across_systems and _is_system(out[at]))), None)
        if last is None or _is_system(message) or not _go_together(out[last], message):
            out.append(message)
        else:
            out[last] = _one_of(out[last], message)
    return out


def _one_of(one: ChatMessage, other: ChatMessage) -> ChatMessage:
    reasoning = _joined(one.reasoning, other.reasoning)
    if one.has_images or other.has_images:
        return replace(one, content=(*one.parts, *other.parts), reasoning=reasoning)
    return replace(one, content=_joined(one.text, other.text), reasoning=reasoning)


def _joined(*texts: str) -> str:
    return "\n\n".join(filter(None, texts))
