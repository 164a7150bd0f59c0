"""Tells how many instances each pool shall have where its size does not follow its load, so that one that stays away shows."""

import logging
from collections.abc import Callable
from typing import Final

from cluster.scheduler.scaling.autoscaler import Facts, PoolSizes
from core.ports import Clock
from core.reports import PoolStatus

log = logging.getLogger(__name__)

PERIOD_S: Final = 10.0


class PoolWatch:
    """Looks while `run` runs. `told` is called with what was found each time."""

    def __init__(
        self, facts: Facts, sizes: PoolSizes, clock: Clock, told: Callable[[tuple[PoolStatus, ...]], None]
    ) -> None:
        self._facts, self._sizes, self._clock, self._told = facts, sizes, clock, told

    async def run(self) -> None:
        """Run for as long as the scheduler lives, until cancelled. Failures are logged and tried again."""
        while True:
            await self._clock.sleep(PERIOD_S)
            try:
                if self._facts.leads:
                    sizes = await self._sizes.get()
                    self._told(tuple(PoolStatus(pool=pool, wanted=sizes[pool]) for pool in sorted(sizes)))
            except Exception:
                log.exception("it cannot be told how many instances pools shall have")
