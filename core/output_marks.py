"""The lengths at which a report names an output that still runs (`LoadReport.grown`), so that the scheduler learns how long
outputs are before they end: 16 tokens, and each of the others longer than the one before by the square root of two."""

from bisect import bisect_right
from math import ceil
from sys import maxsize
from typing import Final

MARKS_PER_DOUBLING: Final = 2


def mark(number: int) -> int:
    """Return the least length that is not below 1 doubled `number` / MARKS_PER_DOUBLING times."""
    return ceil(2 ** (number / MARKS_PER_DOUBLING))


MARKS: Final = tuple(map(mark, range(8, 49)))
"""Output tokens: 16, 23, 32, 46, 64 and so on."""


def next_mark(num_output: int) -> int:
    """Return the least mark above so many output tokens; behind the last one `maxsize`."""
    index = bisect_right(MARKS, num_output)
    return MARKS[index] if index < len(MARKS) else maxsize
