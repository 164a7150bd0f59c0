"""Wall time behind the Clock seam; the simulator has its own."""

import asyncio
import time


class WallClock:
    """Monotonic seconds. Comparable only within one host, which is all that deadlines here need."""

    def now(self) -> float:
        return time.monotonic()

    async def sleep(self, delay_s: float) -> None:
        await asyncio.sleep(delay_s)
