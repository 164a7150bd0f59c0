"""In which order several schedulers hear of the same report.

Room that a report shows would be filled by all of them at once. So the first fills it, and the others hear of it a little later,
after its words of what it has placed. Turns go round, report by report."""

from collections.abc import Sequence
from zlib import crc32

TURN_S = 0.005
"""Between one scheduler and the next: longer than a word from one to the other takes."""


def in_turn(schedulers: Sequence[str], instance: str, report: int) -> list[str]:
    """All of `schedulers`, the one first whose turn it is for this report of that instance."""
    first = (crc32(instance.encode()) + report) % len(schedulers)
    return [*schedulers[first:], *schedulers[:first]]
