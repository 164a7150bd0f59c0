"""Which lines of Baton an input reaches, to keep few inputs that reach much."""

import sys
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any

from tests.fuzz.targets import Target

_ROOT = Path(__file__).parents[2]
_ROOMS = tuple(
    str(_ROOT / room) for room in ("baton", "cluster", "core", "engine", "kvtransfer", "models", "net")
)
Lines = frozenset[tuple[str, int]]


def reached(target: Target, data: bytes) -> Lines:
    """Return the lines that run in this thread."""
    found: set[tuple[str, int]] = set()

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        if not frame.f_code.co_filename.startswith(_ROOMS):
            return None
        if event == "line":
            found.add((frame.f_code.co_filename, frame.f_lineno))
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        with suppress(AssertionError):
            target(data)
    finally:
        sys.settrace(before)
    return frozenset(found)


def reaching_more(target: Target, inputs: Iterable[bytes], old: Iterable[bytes]) -> list[bytes]:
    """Return those of `inputs`, the short ones first, that reach what neither `old` nor those before them do."""
    known = set[tuple[str, int]]().union(*(reached(target, data) for data in old))
    found: list[bytes] = []
    for data in sorted(inputs, key=len):
        more = reached(target, data) - known
        if more:
            known |= more
            found.append(data)
    return found
