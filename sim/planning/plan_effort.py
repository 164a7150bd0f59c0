"""How much a plan may simulate, counted in events of the simulation and not in seconds: a machine's speed, and what else it does,
change when an answer comes and not which."""

import sys

_WORK = 250_000
"""An effort of one, in events of a simulation without a queue."""


class Effort:
    """What may still be simulated."""

    def __init__(self, times: float = 0.0) -> None:
        """Allow so many times an effort of one; 0: whatever it takes."""
        self._whole = int(times * _WORK) or sys.maxsize
        self._spent = self._kept = 0

    @property
    def left(self) -> int:
        """Return how much is left, but for what is kept."""
        return max(0, self._whole - self._kept - self._spent)

    def keep(self, share: float) -> None:
        """Keep this share of the whole for later."""
        self._kept = int(share * self._whole)

    def spend(self, work: int) -> None:
        self._spent += work
