"""Which prompts are hopeless: no instance, not even one with nothing else to do, would give their first token in time.

To compute such a prompt puts nobody in time, and what waits meanwhile may be late for it. So it is refused by name, unless its
class says that it runs (`Slo.hopeless`). Three things keep from refusing too much: only what could still be in time, and has to
wait, shows that the fleet lacks the time; an estimate counts less twice its own error; and where steps are not known yet, or
cannot be foreseen, nothing is hopeless. One that is taken gives way to the others of its class: it is served with the next lower
priority, in the queue and wherever it runs."""

from math import inf
from typing import Final

from core.messages import Place

_OVERLOAD_S: Final = 5.0
"""The fleet counts as short of time for so long after a request that could still be in time has had to wait."""
_NUM_ERRORS: Final = 2.0


class IdleEstimate:
    """When an idle instance would give a prompt's first token. Never changed."""

    __slots__ = ("error", "ttft_s")

    def __init__(self, ttft_s: float, error: float) -> None:
        """`error` is the mean error of the step times that `ttft_s` is made of, as a share of them."""
        self.ttft_s, self.error = ttft_s, error

    @property
    def least_s(self) -> float:
        """The time that it takes in any case."""
        return self.ttft_s * max(0.0, 1 - _NUM_ERRORS * self.error)


class HopelessRule:
    def __init__(self) -> None:
        self._short_of_time_at = -inf

    def observe(self, some_wait_in_time: bool, now: float) -> None:
        """Note, after each event, whether any wait that could still be in time."""
        if some_wait_in_time:
            self._short_of_time_at = now

    def holds_for(self, place: Place, now: float) -> bool:
        """Return whether the request, which is hopeless, is refused now."""
        return place.slo.hopeless == "refuse" and now - self._short_of_time_at <= _OVERLOAD_S
