"""How many requests of one class come to a model per second: lately, and in the mean."""

from math import exp

_LATELY_S, _MEAN_S = 10.0, 60.0


class DemandRate:
    """Feed it counts, with `now` never going back."""

    def __init__(self, num: int, now: float) -> None:
        self._num, self._at = num, now
        self._lately = self._mean = 0.0

    def note(self, num: int, now: float) -> None:
        """Take in how many have come since the count began. A lower number than before means that it has begun anew."""
        came = num - self._num if num >= self._num else num
        self._lately = self._fade(self._lately, _LATELY_S, now) + came / _LATELY_S
        self._mean = self._fade(self._mean, _MEAN_S, now) + came / _MEAN_S
        self._num, self._at = num, now

    def forecast(self, now: float) -> float:
        """Return requests per second: as in the mean, or as lately if that is more, since a burst goes on for some time."""
        return max(self._fade(self._lately, _LATELY_S, now), self._fade(self._mean, _MEAN_S, now))

    def _fade(self, rate: float, over_s: float, now: float) -> float:
        return rate * exp((self._at - now) / over_s)
