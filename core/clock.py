"""Wall time behind the Clock seam; the simulator has its own."""

import asyncio
import time

_BEGAN_S = time.time() - time.monotonic()
"""The epoch's time at the monotonic clock's zero, as this process saw it when it started."""


def current_time() -> float:
    """Return the seconds since the epoch. They never jump nor go back, and are comparable among hosts as closely as their clocks
    agree.

    A deadline goes with its request from the ingress to instances on other hosts, whose monotonic clocks have other zeros."""
    return _BEGAN_S + time.monotonic()


class WallClock:
    def now(self) -> float:
        return current_time()

    async def sleep(self, delay_s: float) -> None:
        await asyncio.sleep(delay_s)
