"""Where long work on a body may rest: between two of its pieces.

A thread that works for 100 ms keeps others from a processor, and from Python's lock, for all that time. While it rests after each
piece, others have their turn."""

import time
from collections.abc import Callable
from contextvars import Context, ContextVar

_LEAST_WORK_S = 0.001
"""How long work goes on before its next rest, at least."""


class Pace:
    """The rests of one piece of work, on whichever thread does its next step."""

    def __init__(self, rest: Callable[[], float]) -> None:
        """`rest` returns how many times as long as it worked the work rests now. The threads of the work call it."""
        self._rest = rest
        self._looked_at = self._began_at = 0.0
        self.rested_for_s = 0.0
        """The processor time of this step that was followed by a rest."""

    def set_in(self, context: Context) -> None:
        """Let what runs in the context rest."""
        context.run(_PACE.set, self)

    def begin(self) -> None:
        """Begin a step on this thread."""
        self._looked_at, self._began_at, self.rested_for_s = time.perf_counter(), time.thread_time(), 0.0

    def may_rest(self) -> None:
        """Rest, if it is time for it."""
        if time.perf_counter() - self._looked_at < _LEAST_WORK_S:
            return
        worked_s = time.thread_time() - self._began_at
        if factor := self._rest():
            time.sleep(factor * worked_s)
            self.rested_for_s += worked_s
        self._looked_at, self._began_at = time.perf_counter(), time.thread_time()


_PACE: ContextVar[Pace | None] = ContextVar("pace", default=None)


def between_pieces() -> None:
    """Let other work have its turn, where this is long work of a tenant beside others. It takes 0.1 µs elsewhere."""
    if (pace := _PACE.get()) is not None:
        pace.may_rest()
