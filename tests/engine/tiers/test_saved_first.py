"""A step that may write over a block begins when the block is saved."""

import asyncio

from core.config.adapter_config import HoldAdapters
from core.errors import Hung
from core.plan import StepPlan, StepResult
from core.ports import OnReady
from engine.tiers.saved_first import SavedFirst
from tests.patience import until


class Ranks:
    """A WorkerGroup whose steps end when the test says so."""

    def __init__(self) -> None:
        self.begun: list[int] = []
        self.over = asyncio.Event()

    async def execute(self, plan: StepPlan) -> StepResult:
        self.begun.append(plan.step)
        await self.over.wait()
        return StepResult(step=plan.step, sampled=(), duration_s=0.0)

    async def hold_adapters(self, asked: HoldAdapters) -> dict[str, str]:
        return {}

    def on_ready(self, hear: OnReady) -> None: ...
    async def lost(self) -> Exception:
        return ValueError("lost")

    async def give_up(self, why: str) -> Hung:
        return Hung(why)

    async def close(self) -> None: ...


async def test_steps_begin_in_their_order_once_nothing_is_being_saved_and_do_not_wait_for_each_other() -> (
    None
):
    ranks, idle, asked = Ranks(), asyncio.Event(), list[int]()

    async def settled() -> None:
        asked.append(1)
        await idle.wait()

    group = SavedFirst(ranks, settled)
    steps = [
        asyncio.create_task(group.execute(StepPlan(step=number, new=(), copies=(), work=(), drop=())))
        for number in range(3)
    ]
    await until(lambda: bool(asked))
    assert ranks.begun == []
    idle.set()
    await until(lambda: len(ranks.begun) == 3)
    assert ranks.begun == [0, 1, 2]
    ranks.over.set()
    assert [result.step for result in await asyncio.gather(*steps)] == [0, 1, 2]
