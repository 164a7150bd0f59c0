"""Which prompts are hopeless: no instance, not even one with nothing else to do, would give their first token in time.

To compute such a prompt puts nobody in time, and what waits meanwhile may be late for it. So it is refused by name, unless its
class says that it runs (`Slo.hopeless`), where the fleet lacks the time or the room: where something has to wait that could still
be in time, or instances are rather full, so that one more long context makes all that runs there take longer. An estimate counts
less twice its own error; and where steps are not known yet, or cannot be foreseen, nothing is hopeless. One that is taken gives
way to the others of its class: it is served with the next lower priority, in the queue and wherever it runs."""

from math import inf

from core.messages import PlaceRequest
from core.scheduler_tuning import SchedulerTuning


class IdleEstimate:
    """When an idle instance would give a prompt's first token. Never changed."""

    __slots__ = ("error", "fullness", "ttft_s")

    def __init__(self, ttft_s: float, error: float, fullness: float = 0.0) -> None:
        """`error` is what `ttft_s` may be off by, as a share of it. `fullness` says how busy instances are."""
        self.ttft_s, self.error, self.fullness = ttft_s, error, fullness

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

    def holds_for(self, place: PlaceRequest, estimate: IdleEstimate, now: float) -> bool:
        """Return whether the request, which is hopeless, is refused now."""
        if place.slo.hopeless != "refuse":
            return False
        tuning = self._tuning
        is_full = estimate.fullness > tuning.full_share
        return is_full or now - self._short_of_time_at <= tuning.overload_s
