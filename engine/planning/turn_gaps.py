"""How long sessions take between an answer and the next turn, and when the next turn of one is to be expected."""

from collections import deque
from collections.abc import Sequence

_OF_SESSION, _OF_TENANT = 16, 256
"""The most gaps that count, the last ones."""
_FEWEST_OF_SESSION, _FEWEST_OF_TENANT = 6, 8
"""Fewer say nothing."""
_FOR_READING = 1 / 16
"""The part of a gap that reading a session back may take."""


class TurnGaps:
    """The gaps of one session, or of all of a tenant's sessions."""

    def __init__(self, *, of_tenant: bool = False) -> None:
        self._fewest = _FEWEST_OF_TENANT if of_tenant else _FEWEST_OF_SESSION
        self._gaps_s: deque[float] = deque(maxlen=_OF_TENANT if of_tenant else _OF_SESSION)

    def add(self, gap_s: float) -> None:
        self._gaps_s.append(gap_s)

    @property
    def expected_s(self) -> tuple[float, float] | None:
        """Return after how long the next turn is to be expected, at the soonest and at the latest; None where too few gaps are
        known. Gaps mostly lie where half of them lie densest, or no farther from it than that is wide. Some time is left for
        reading."""
        if len(self._gaps_s) < self._fewest:
            return None
        first_s, last_s = shortest_half(self._gaps_s)
        width_s = last_s - first_s
        return max(0.0, first_s - width_s - first_s * _FOR_READING), last_s + width_s


def shortest_half(values: Sequence[float]) -> tuple[float, float]:
    """Return the ends of the shortest interval that has half of the values, at least one: where they lie densest (the shorth;
    Andrews et al., Robust Estimates of Location, 1972). Of several the first."""
    ordered = sorted(values)
    num = (len(ordered) + 1) // 2
    pairs = zip(ordered, ordered[num - 1 :], strict=False)
    return min(pairs, key=lambda pair: pair[1] - pair[0])
