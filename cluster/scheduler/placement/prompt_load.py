"""How much of their time the instances that decode spend on prompts, and how much longer that makes their steps."""

from math import erf, exp, pi, sqrt
from typing import Final

_FAR: Final = 8.0
"""The number of deviations from which on the longer of two times is the one with the longer mean, to all digits."""


class PromptLoad:
    """The prompt work that comes to one instance that decodes, as a share of its time.

    Until a prompt's first token is due it takes its work's share of that time, so the load at an instant is shot noise. Its mean
    and variance are by Campbell's theorem (Rice, 1944). Prompts count for as long as their sequences live. Late ones do not: they
    let others pass, and steps get no longer for them."""

    def __init__(self) -> None:
        self._at = 0.0
        """When the last prompt was placed."""
        self._seconds = self._work_s = self._squares_s = 0.0
        self._share = self._deviation = 0.0
        """The mean and the deviation of the load. They are asked much more often than they change."""

    def placed(self, work_s: float, within_s: float, lives_s: float, num_instances: int, now: float) -> None:
        """Note a prompt that takes `work_s` and is due in `within_s`, on one of so many instances. Sequences live `lives_s`."""
        within_s = max(within_s, work_s)
        passed_s = now - self._at if self._seconds else 0.0
        self._at = now
        kept = exp(-passed_s / lives_s)
        self._seconds = max(self._seconds * kept + min(passed_s, lives_s), min(within_s, lives_s))
        self._work_s = self._work_s * kept + work_s / num_instances
        self._squares_s = self._squares_s * kept + work_s * work_s / within_s / num_instances
        self._share, self._deviation = self._work_s / self._seconds, sqrt(self._squares_s / self._seconds)

    def step_s(self, reads_s: float, computes_s: float) -> float:
        """Return how long a step is expected to take that reads for so long, and computes the prompt work that comes in that time
        beside `computes_s` of its own. Without prompts it takes what it reads; 0 where that is not known."""
        if not reads_s or not self._share:
            return reads_s
        return longer_s(reads_s, computes_s + self._share * reads_s, self._deviation * reads_s)


def longer_s(reads_s: float, computes_s: float, deviation_s: float) -> float:
    """Return the mean of the longer of two times. The second is normally distributed (Clark, 1961)."""
    apart_s = reads_s - computes_s
    if abs(apart_s) >= _FAR * deviation_s:
        return max(reads_s, computes_s)
    z = apart_s / deviation_s
    return reads_s + deviation_s * (exp(-z * z / 2) / sqrt(2 * pi) - z * (1 - erf(z / sqrt(2))) / 2)
