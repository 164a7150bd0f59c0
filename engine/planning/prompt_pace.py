"""How fast an instance computes prompts, as it reports it.

The median of a few steps, so that one that something else held up decides nothing. Without recent steps it is unknown: whoever
places requests then assumes what is usual, and an instance that was slow for a moment is tried again instead of shunned."""

from collections import deque
from statistics import median

_NUM_STEPS = 5
_FRESH_S = 10.0


class PromptPace:
    def __init__(self) -> None:
        self._rates: deque[float] = deque(maxlen=_NUM_STEPS)
        self._last_s = 0.0

    def note(self, now: float, tokens_per_s: float) -> None:
        self._rates.append(tokens_per_s)
        self._last_s = now

    def tokens_per_s(self, now: float) -> float:
        """0: unknown."""
        return median(self._rates) if self._rates and now - self._last_s < _FRESH_S else 0.0
