"""In which order several schedulers get the same report.

All of them at once would fill the room that a report shows. So the first fills it, and the others get the report a little later,
after the first one's messages of what it has placed. The first place goes round, report by report."""

from collections.abc import Sequence
from zlib import crc32

TURN_S = 0.005
"""The time between one scheduler and the next: longer than a message from one to the other takes."""


def in_turn(schedulers: Sequence[str], instance: str, report: int) -> list[str]:
    """Return all of `schedulers`, beginning with the one whose turn it is for this report of that instance."""
    first = (crc32(instance.encode()) + report) % len(schedulers)
    return [*schedulers[first:], *schedulers[:first]]
