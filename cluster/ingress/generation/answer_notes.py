"""Tells clients, and now and then the log, which part of a request an answer does without."""

import json
import logging
import re
from collections import OrderedDict
from collections.abc import Sequence

from core.clock import current_time

log = logging.getLogger(__name__)

HEADER = "x-baton-warning"
_MAX_CHARACTERS = 1024
_QUIET_S = 600.0
_MAX_LINES = 64
"""The most lines in `_QUIET_S`: clients make up names."""


class AnswerNotes:
    """The log has each note of a route once in ten minutes, since a client sends the same fields with every request."""

    def __init__(self) -> None:
        self._logged_at: OrderedDict[tuple[str, str], float] = OrderedDict()

    def headers(self, route: str, notes: Sequence[str]) -> dict[str, str]:
        """Return the header with the notes, and log what was not logged lately."""
        if not notes:
            return {}
        for note in notes:
            self._log(route, _ascii(note))
        return {HEADER: _ascii("; ".join(notes))}

    def _log(self, route: str, note: str) -> None:
        key, now = (route, re.sub(r"\[\d+\]", "[]", note)), current_time()
        while self._logged_at and now - next(iter(self._logged_at.values())) >= _QUIET_S:
            self._logged_at.popitem(last=False)
        if key in self._logged_at or len(self._logged_at) >= _MAX_LINES:
            return
        self._logged_at[key] = now
        log.warning("%s: an answer does without part of its request: %s", route, note)


def _ascii(text: str) -> str:
    """Return the text as a header may have it. Part of it is a client's."""
    escaped = json.dumps(text)[1:-1].replace("\x7f", "?")
    return escaped if len(escaped) <= _MAX_CHARACTERS else escaped[:_MAX_CHARACTERS] + "..."
