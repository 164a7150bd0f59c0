"""Keeps what is late from places that those lack who can be in time.

A sequence keeps its place for as long as it decodes. So a late one takes it from those that come in that time. Where none of them
has lacked a place for so long, it costs them nothing."""

from math import inf
from typing import Final

_MOST_S: Final = 30.0
"""What is late is kept back for no longer after the last lack, however long sequences decode."""


class Scarcity:
    def __init__(self) -> None:
        self._until: dict[int, float] = {}
        """Level -> how long places are scarce for it, since a request that could be in time found none."""

    def note(self, level: int, lives_s: float, now: float) -> None:
        """Note that a request of that level found no place, where sequences decode for `lives_s`. Nothing happens while that is
        not known."""
        if lives_s < inf:
            self._until[level] = now + min(lives_s, _MOST_S)

    def is_felt(self, level: int, now: float) -> bool:
        """Return whether places are scarce for that level or a higher one."""
        return any(now < until for lacking, until in self._until.items() if lacking >= level)
