"""How much a plan may simulate, counted in events of the simulation and not in seconds: a machine's speed, and what else it does,
change when an answer comes and not which."""

import sys

_EVENTS = 150_000
"""An effort of one."""


class Effort:
    """What may still be simulated."""

    def __init__(self, times: float = 0.0) -> None:
        """Allow so many times an effort of one; 0: whatever it takes."""
        self._num_events = int(times * _EVENTS) or sys.maxsize
        self._num_spent = self._num_kept = 0

    @property
    def num_left(self) -> int:
        """Return how many events are left, but for those that are kept."""
        return max(0, self._num_events - self._num_kept - self._num_spent)

    def keep(self, share: float) -> None:
        """Keep this share of the whole for later."""
        self._num_kept = int(share * self._num_events)

    def spend(self, num_events: int) -> None:
        self._num_spent += num_events
