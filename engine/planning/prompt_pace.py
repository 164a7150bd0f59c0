"""How fast an instance computes prompts, as it reports it.

It is the median of a few steps, so that one disturbed step decides nothing. Without recent steps it is unknown. Placement then
assumes the usual pace, so that an instance that was slow for a moment is tried again."""

from collections import deque
from statistics import median

_NUM_STEPS = 5
_FRESH_S = 10.0


class PromptPace:
    def __init__(self) -> None:
        self._rates: deque[float] = deque(maxlen=_NUM_STEPS)
        self._last_at = 0.0

    def note(self, now: float, tokens_per_s: float) -> None:
        self._rates.append(tokens_per_s)
        self._last_at = now

    def tokens_per_s(self, now: float) -> float:
        """The median pace of recent steps; 0 when it is unknown."""
        return median(self._rates) if self._rates and now - self._last_at < _FRESH_S else 0.0
