"""What an instance tells its schedulers: all of them the same, in turns; a new one everything first."""

import asyncio
from typing import Any

from cluster.instance.reporting import Reporter
from core.clock import WallClock
from core.cost.steps import UNKNOWN_STEPS
from core.messages import Leaving, Message
from core.ports import Resolve
from core.reports import LoadReport, Register, TierCounts, WorkCounts
from engine.loop import EngineLoad
from engine.planning.planner_load import PlannerLoad
from net.loopback_mail import LoopbackMail, LoopbackNetwork
from tests.cluster.scheduler.routing_world import instance
from tests.patience import PATIENCE_S


class Cache:
    """The parts of an engine that are reported; what is cached changes by `learn` and `lose`."""

    def __init__(self) -> None:
        self.held: set[int] = set()
        self.cached = self
        self.added: set[int] = set()
        self.removed: set[int] = set()
        self.free = 100

    def learn(self, block: int) -> None:
        self.held.add(block)
        self.added.add(block)
        self.free -= 1

    def lose(self, block: int) -> None:
        self.held.discard(block)
        self.removed.add(block)
        self.free += 1

    def load(self) -> EngineLoad:
        return EngineLoad(
            planned=PlannerLoad(num_available_blocks=self.free),
            tokens_per_s=0.0,
            step_s=0.0,
            steps=UNKNOWN_STEPS,
        )

    def drain_cache_events(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        events = tuple(sorted(self.added)), tuple(sorted(self.removed))
        self.added, self.removed = set(), set()
        return events

    def replay_cache_events(self) -> None:
        self.added, self.removed = set(self.held), set()

    def drain_received(self) -> tuple[str, ...]:
        return ()

    def drain_grown(self) -> tuple[tuple[str, int], ...]:
        return ()

    def drain_experts(self, again: bool) -> tuple[()]:
        return ()

    def tier_counts(self) -> TierCounts:
        return TierCounts()


class Scheduler:
    def __init__(self, network: LoopbackNetwork, name: str) -> None:
        self.mail: LoopbackMail = network.join(name)
        self.got: list[Message] = []
        self.mail.listen(lambda _, message: self.got.append(message), lambda _: None)

    @property
    def cached(self) -> set[int]:
        """By its own account."""
        known: set[int] = set()
        for message in self.got:
            if isinstance(message, LoadReport):
                known = (known | set(message.cache_added)) - set(message.cache_removed)
        return known

    async def knows(self, blocks: set[int]) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while self.cached != blocks:
                await asyncio.sleep(0.001)


def reporter_of(
    engine: Any, mail: LoopbackMail, resolve: Resolve, *, num_schedulers: int, num_spares: int = 0
) -> Reporter:
    return Reporter(
        instance(mail.address),
        engine,
        mail,
        WallClock(),
        resolve=resolve,
        num_schedulers=num_schedulers,
        interval_s=0.002,
        check=lambda: None,
        count=WorkCounts,
        links=tuple,
        drain_sent=tuple,
        num_spare_schedulers=num_spares,
    )


async def test_a_spare_hears_each_report_after_the_scheduler_that_places() -> None:
    network, engine = LoopbackNetwork(), Cache()
    heard: list[str] = []
    listed: list[Scheduler] = []

    def join(name: str) -> None:
        listed.append(scheduler := Scheduler(network, name))
        scheduler.mail.listen(
            lambda _, message: heard.append(name) if isinstance(message, LoadReport) else None, lambda _: None
        )

    async def resolve() -> list[str]:
        return [scheduler.mail.address for scheduler in listed]

    async def hears(count: int) -> list[str]:
        heard.clear()
        async with asyncio.timeout(PATIENCE_S):
            while len(heard) < count:
                engine.learn(len(engine.held))
                await asyncio.sleep(0.001)
        return heard

    join("b")
    mail = network.join("i")
    reporter = reporter_of(engine, mail, resolve, num_schedulers=1, num_spares=1)
    mail.listen(lambda *_: None, reporter.peer_lost)
    running = asyncio.create_task(reporter.run())
    await hears(2)
    join("a")
    while "a" not in await hears(2):
        pass
    order = (await hears(20))[:20]
    assert order[order.index("b") :][:16] == ["b", "a"] * 8
    await listed[0].mail.close()
    while "b" in await hears(2):
        pass
    assert set(await hears(4)) == {"a"}
    running.cancel()


async def test_all_hear_the_same_and_a_new_one_everything() -> None:
    network, engine = LoopbackNetwork(), Cache()
    first, second = Scheduler(network, "a"), Scheduler(network, "b")
    listed = [first]
    mail = network.join("i")

    async def resolve() -> list[str]:
        return [scheduler.mail.address for scheduler in listed]

    reporter = reporter_of(engine, mail, resolve, num_schedulers=2)
    mail.listen(lambda *_: None, reporter.peer_lost)
    running = asyncio.create_task(reporter.run())
    for block in (1, 2, 3):
        engine.learn(block)
    await first.knows({1, 2, 3})
    assert isinstance(first.got[0], Register)
    engine.lose(2)
    listed.append(second)
    await first.knows({1, 3})
    await second.knows({1, 3})
    engine.learn(4)
    await first.knows({1, 3, 4})
    await second.knows({1, 3, 4})
    told = [
        block for message in first.got if isinstance(message, LoadReport) for block in message.cache_added
    ]
    assert told == [1, 2, 3, 4], "nothing is told twice to one that knows"
    assert sum(isinstance(message, Register) for message in first.got) == 1
    await first.mail.close()
    engine.learn(5)
    await second.knows({1, 3, 4, 5})
    reporter.leave()
    third = Scheduler(network, "c")
    listed[0] = third
    await third.knows({1, 3, 4, 5})
    assert [type(message) for message in third.got[:3]] == [Register, Leaving, LoadReport]
    assert any(isinstance(message, Leaving) for message in second.got)
    running.cancel()
