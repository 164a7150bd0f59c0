"""The events of one answer. Every API is an adapter from these to its own bodies.

The text of a sequence becomes reasoning, text, and calls. A call begins, has arguments, and ends before the next begins."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Protocol

from cluster.ingress.parsers.stop_strings import StopStrings


@dataclass(frozen=True, slots=True)
class Text:
    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    text: str


@dataclass(frozen=True, slots=True)
class CallBegins:
    """The `index`-th call of the answer, counted from 0."""

    index: int
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """A piece of the call's arguments. The pieces join to a JSON object when the model wrote one to its end."""

    index: int
    text: str


@dataclass(frozen=True, slots=True)
class CallEnds:
    index: int
    is_whole: bool = True
    """False where the text ended, or broke off, within the arguments."""


OutputEvent = Text | Reasoning | CallBegins | CallArguments | CallEnds


class OutputParser(Protocol):
    """Makes events out of one sequence's text. Any split of the text gives the same events once neighbours are joined."""

    @property
    def is_reasoning(self) -> bool:
        """Whether what comes next belongs to the reasoning."""
        ...

    @property
    def is_complete(self) -> bool:
        """Whether the answer has all the calls that the request allows, so that nothing more is wanted."""
        ...

    def push(self, text: str) -> tuple[OutputEvent, ...]: ...
    def finish(self, *, cut: bool = False) -> tuple[OutputEvent, ...]:
        """Return what was held back, when no more text comes. A call that is open ends. `cut`: a limit ended the text, and not
        the model."""
        ...


class PlainParser:
    """Takes all text as text."""

    is_reasoning = False
    is_complete = False

    def __init__(self, stops: StopStrings | None = None) -> None:
        self._stops = stops or StopStrings()

    def push(self, text: str) -> tuple[OutputEvent, ...]:
        return self._text(self._stops.push(text))

    def finish(self, *, cut: bool = False) -> tuple[OutputEvent, ...]:
        return self._text(self._stops.flush())

    def _text(self, text: str) -> tuple[OutputEvent, ...]:
        return (Text(text),) if text else ()


def joined(events: Iterable[OutputEvent]) -> list[OutputEvent]:
    """Return `events` with neighbours of one kind (and one call) made one."""
    out: list[OutputEvent] = []
    for event in events:
        last = out[-1] if out else None
        match event, last:
            case (Text(text), Text(before)) | (Reasoning(text), Reasoning(before)):
                out[-1] = replace(event, text=before + text)
            case CallArguments(index, text), CallArguments(same, before) if index == same:
                out[-1] = CallArguments(index, before + text)
            case _:
                out.append(event)
    return out
