"""How long an instance will take to wake up: as it did the last times, and before that as the phases of its start say."""

from core.reports import StartTimes
from core.sleep_messages import SleepLevel

_SHARE = 0.5
"""How much of a prediction the last waking makes up."""
_ONCE = frozenset({"imports", "files", "sizes"})
"""The phases of a start that no waking has."""
_WEIGHTS = frozenset({"kernels", "ranks", "meeting", "reading", "checking", "packing", "mapping", "grammars"})
"""The phases that an instance skips whose weights are in host memory."""


class WakeTimes:
    def __init__(self) -> None:
        self._start = StartTimes()
        self._learned: dict[SleepLevel, float] = {}

    def began(self, start: StartTimes) -> None:
        """Note how long the first start has taken."""
        self._start = start

    def woke(self, level: SleepLevel, start: StartTimes) -> None:
        """Note how long waking from `level` has taken."""
        if start.phases:
            if not self._start.phases:
                self._start = start  # it began asleep
            before = self._learned.get(level, start.whole_s)
            self._learned[level] = before + _SHARE * (start.whole_s - before)

    def predicted_s(self, level: SleepLevel) -> float:
        left_out = _ONCE | _WEIGHTS if level == 1 else _ONCE
        phases = (seconds for phase, seconds in self._start.phases if phase not in left_out)
        return self._learned.get(level, sum(phases))
