"""Steps that begin when every block that is being saved has left.

Ranks on GPUs write pools that their memory servers read, in other processes: nothing on a device orders the two."""

import asyncio
from collections.abc import Awaitable, Callable

from core.config.adapter_config import HoldAdapters
from core.errors import Hung
from core.plan import StepPlan, StepResult
from core.ports import OnReady, WorkerGroup


class SavedFirst:
    """A core.ports.WorkerGroup."""

    def __init__(self, group: WorkerGroup, settled: Callable[[], Awaitable[object]]) -> None:
        """`settled` waits for all that is being saved."""
        self._group, self._settled = group, settled
        self._turn = asyncio.Lock()
        """Steps begin in the order of the calls."""

    async def execute(self, plan: StepPlan) -> StepResult:
        async with self._turn:
            await self._settled()
            running = asyncio.ensure_future(self._group.execute(plan))
            await asyncio.sleep(0)  # it begins before the next one may
        return await running

    async def hold_adapters(self, asked: HoldAdapters) -> dict[str, str]:
        return await self._group.hold_adapters(asked)

    def on_ready(self, hear: OnReady) -> None:
        self._group.on_ready(hear)

    async def lost(self) -> Exception:
        return await self._group.lost()

    async def give_up(self, why: str) -> Hung:
        return await self._group.give_up(why)

    async def close(self) -> None:
        await self._group.close()
