"""Which prompts are hopeless: no instance, not even one with nothing else to do, would give their first token in time.

To compute such a prompt puts nobody in time, and what waits meanwhile may be late for it. So it is refused by name, unless its
class says that it runs (`Slo.hopeless`), where the fleet lacks the time: something has to wait that could still be in time. An
estimate counts less twice its own error. Where steps are not known yet, or cannot be foreseen, nothing is hopeless. One that is
taken gives way to the others of its class: it is served with the next lower priority, in the queue and wherever it runs."""

from math import inf

from core.messages import PlaceRequest
from core.scheduler_tuning import SchedulerTuning


class IdleEstimate:
    """When an idle instance would give a prompt's first token. Never changed."""

    __slots__ = ("error", "ttft_s")

    def __init__(self, ttft_s: float, error: float) -> None:
        """`error` is what `ttft_s` may be off by, as a share of it."""
        self.ttft_s, self.error = ttft_s, error

    @property
    def least_s(self) -> float:
        """The time that it takes in any case."""
        return self.ttft_s * max(0.0, 1 - self.error)


class HopelessRule:
    def __init__(self, tuning: SchedulerTuning) -> None:
        self._tuning = tuning
        self._short_of_time_at = -inf

    def observe(self, now: float, *, some_wait_in_time: bool) -> None:
        """Note, after each event, whether any wait that could still be in time."""
        if some_wait_in_time:
            self._short_of_time_at = now

    def holds_for(self, place: PlaceRequest, now: float) -> bool:
        """Return whether the request, which is hopeless, is refused now."""
        return place.slo.hopeless == "refuse" and now - self._short_of_time_at <= self._tuning.overload_s
