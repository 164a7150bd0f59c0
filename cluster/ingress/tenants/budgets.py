"""Budgets of tokens per day and month, by what the ledger has.

What was used in the last few seconds is not in the ledger yet, so a budget is exceeded by as much."""

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from datetime import UTC, datetime

from cluster.ingress.tenants.use_limits import Limited
from cluster.store.usage_port import DAY_S, Dimension, UsageQuery, UsageResult, UsageStore
from core.errors import BatonError, Overloaded

log = logging.getLogger(__name__)

LOOK_S = 5.0
_BY: tuple[Dimension, ...] = ("tenant", "key_id", "model")


class Budgets:
    """Belongs to one event loop. Before the ledger is read for the first time, and while the database is gone, what was read last
    holds."""

    def __init__(self, store: UsageStore, now: Callable[[], float] = time.time) -> None:
        self._store, self._now = store, now
        self._results: list[UsageResult] = []
        self._looked_at = float("-inf")
        self._looking: asyncio.Task[None] | None = None

    def check(self, limited: Limited) -> None:
        """Raise Overloaded where a budget is used up."""
        limits = limited.limits
        if not (limits.tokens_per_day or limits.tokens_per_month):
            return
        self._look_soon()
        now = int(self._now())
        day = now - now % DAY_S
        for most, begin, end, span in (
            (limits.tokens_per_day, day, day + DAY_S, "day"),
            (limits.tokens_per_month, *_month(now), "month"),
        ):
            if most and self._used(limited.dimensions, begin) >= most:
                reason = f"{limited.whose} may have {most} tokens per {span}, which are used up"
                again = f"the next {span} begins in {end - now} s (UTC)"
                raise Overloaded(f"budget: {reason}; {again}", end - now, "insufficient_quota")

    def _used(self, of: Mapping[Dimension, str], begin: int) -> int:
        return sum(
            each.counts.prompt_tokens + each.counts.output_tokens
            for each in self._results
            if each.start >= begin and all(each.by[name] == value for name, value in of.items())
        )

    def _look_soon(self) -> None:
        loop = asyncio.get_running_loop()
        if loop.time() - self._looked_at >= LOOK_S and (self._looking is None or self._looking.done()):
            self._looked_at = loop.time()
            self._looking = loop.create_task(self._look())

    async def _look(self) -> None:
        begin, end = _month(int(self._now()))
        try:
            self._results = await self._store.usage(UsageQuery(begin, end, DAY_S, _BY))
        except (BatonError, OSError) as error:
            log.warning("budgets are checked by what was used before: %s", error)


def _month(now: int) -> tuple[int, int]:
    """Return when the month begins, and when it ends."""
    first = datetime.fromtimestamp(now, UTC).replace(day=1, hour=0, minute=0, second=0)
    following = first.replace(year=first.year + first.month // 12, month=first.month % 12 + 1)
    return int(first.timestamp()), int(following.timestamp())
