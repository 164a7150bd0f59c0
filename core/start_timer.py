"""Times the phases of an instance's start. Each moment belongs to one phase, so that they add up to the whole."""

import logging
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import TypeVar, TypeVarTuple

from core.reports import StartTimes

log = logging.getLogger(__name__)

T = TypeVar("T")
Ts = TypeVarTuple("Ts")


class StartTimer:
    """Begins as it is made, with its first phase. One thread at a time uses it."""

    def __init__(
        self, phase: str, now: Callable[[], float] = time.perf_counter, since: float | None = None
    ) -> None:
        """`since`: when the first phase began, by `now`; None: it begins here."""
        self._now = now
        self._phase, self._since = phase, now() if since is None else since
        self._seconds = {phase: 0.0}
        self._bytes_read = 0

    def begin(self, phase: str) -> None:
        """End the phase that runs and begin `phase`, or go on with it. The log says which begins for the first time."""
        if phase not in self._seconds:
            log.info("the start goes on with %s", phase)
        now = self._now()
        self._seconds[self._phase] += now - self._since
        self._phase, self._since = phase, now
        self._seconds.setdefault(phase, 0.0)

    @contextmanager
    def within(self, phase: str) -> Generator[None]:
        """Time the block as `phase`, and go on with the phase that ran before it."""
        outer = self._phase
        self.begin(phase)
        try:
            yield
        finally:
            self.begin(outer)

    def timed(self, phase: str, call: Callable[[*Ts], T]) -> Callable[[*Ts], T]:
        """Return `call`, each time within `phase`."""

        def call_within(*arguments: *Ts) -> T:
            with self.within(phase):
                return call(*arguments)

        return call_within

    def count_read(self, num_bytes: int) -> None:
        """Count bytes of weights that were read."""
        self._bytes_read += num_bytes

    def take_over(self, others: StartTimes) -> None:
        """Move what another process has timed itself, while this one waited for it, from the phase that runs to those phases."""
        for phase, seconds in others.phases:
            self._seconds[phase] = self._seconds.get(phase, 0.0) + seconds
            self._seconds[self._phase] -= seconds
        self._bytes_read += others.bytes_read

    def times(self) -> StartTimes:
        """Return the phases in the order in which they began, up to now."""
        self.begin(self._phase)
        return StartTimes(phases=tuple(self._seconds.items()), bytes_read=self._bytes_read)
