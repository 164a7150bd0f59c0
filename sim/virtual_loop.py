"""An asyncio event loop whose clock jumps to the next timer instead of waiting for it.

Everything that awaits the loop's timers (asyncio.sleep, timeouts, call_later) runs under virtual time, in the same order on
every run. Invariant: no thread and no real I/O takes part, so that nothing happens outside the virtual clock."""

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

from core.errors import Bug

T = TypeVar("T")


class _JumpingSelector(selectors.SelectSelector):
    """Instead of sleeping for `timeout` seconds, moves the loop's clock on by as much."""

    now = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = super().select(0)
        if ready:
            return ready
        if timeout is None:
            raise Bug("virtual time stands still: every task waits for something that no timer will bring")
        self.now += max(0.0, timeout)
        return []


class VirtualLoop(asyncio.SelectorEventLoop):
    """`time()` is virtual and starts at 0."""

    def __init__(self) -> None:
        self._jumping = _JumpingSelector()
        super().__init__(self._jumping)

    def time(self) -> float:
        return self._jumping.now


class LoopClock:
    """A core.ports.Clock of the running loop: virtual under VirtualLoop, monotonic wall time otherwise."""

    def now(self) -> float:
        return asyncio.get_running_loop().time()

    async def sleep(self, delay_s: float) -> None:
        await asyncio.sleep(delay_s)


def run_virtual(main: Coroutine[Any, Any, T]) -> T:
    """Run `main` under virtual time."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(main)
