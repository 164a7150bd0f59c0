"""Whether a request that came now would be answered in time, as far as the last looks at the cluster say.

Requests wait for a scheduler or an instance that is about to be replaced, so a short absence changes nothing. All ingresses see
it at once: to take all of them out of their service would refuse what could be answered. An ingress that was not ready is ready
again once it has been well for a while."""

from typing import Final

COVERED_S: Final = 10.0
"""A scheduler or the last instance may be away for so long. Requests that come meanwhile wait at most as long."""
STEADY_S: Final = 1.0


class Readiness:
    """Feed it what each look finds, with `now` never going back."""

    def __init__(self) -> None:
        self._has_been_ready = self._is_ready = False
        self._why_not = "nothing is known of the cluster yet"
        self._changed_at: float | None = None
        """Since when looks have found the contrary of what is said; None: they agree."""

    def saw(self, why_not: str, now: float) -> None:
        """Note why a request would not be answered now; empty where it would be."""
        if (not why_not) == self._is_ready:
            self._changed_at = None
        elif self._changed_at is None:
            self._changed_at = now
        self._why_not = why_not or self._why_not
        if self._changed_at is None:
            return
        least_s = COVERED_S if self._is_ready else STEADY_S if self._has_been_ready else 0.0
        if now - self._changed_at >= least_s:
            self._is_ready, self._changed_at = not self._is_ready, None
            self._has_been_ready = True

    @property
    def why_not(self) -> str:
        """Why it is not ready; empty where it is."""
        return "" if self._is_ready else self._why_not
