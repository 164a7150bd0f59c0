"""Schedulers are found, lost, and found again: at once where nobody else lives, less and less often where it keeps away."""

import asyncio
import contextlib

from core.turns import in_turn
from net.schedulers import Schedulers


class Time:
    """core.ports.Clock in the test's hand: sleeping passes the time."""

    def __init__(self) -> None:
        self.moment = 0.0

    def now(self) -> float:
        return self.moment

    async def sleep(self, delay_s: float) -> None:
        self.moment += delay_s
        await asyncio.sleep(0)


class World:
    def __init__(self, count: int, num_spares: int = 0) -> None:
        self.listed: list[str] = []
        self.found: list[tuple[str, float]] = []
        self.num_asked = 0
        self.broken = False
        self.clock = Time()
        self.schedulers = Schedulers(self._resolve, count, self.clock, self._found, num_spares=num_spares)

    @contextlib.asynccontextmanager
    async def running(self):
        task = asyncio.create_task(self.schedulers.run())
        yield self
        assert not task.done()
        task.cancel()

    async def turns(self, count: int = 20) -> None:
        for _ in range(count):
            await asyncio.sleep(0)

    async def _resolve(self) -> list[str]:
        self.num_asked += 1
        if self.broken:
            raise ConnectionError("nobody answers")
        return list(self.listed)

    def _found(self, address: str) -> None:
        assert address in self.schedulers.living
        self.found.append((address, self.clock.moment))


async def test_as_many_as_there_should_be_are_looked_for() -> None:
    async with World(2).running() as world:
        await world.turns()
        assert world.schedulers.first == ""
        world.listed = ["b"]
        await world.turns()
        assert world.schedulers.living == ("b",)
        world.listed = ["b", "a"]
        await world.turns()
        assert world.schedulers.living == ("a", "b")
        assert world.schedulers.first == "a"
        asked = world.num_asked
        await world.turns()
        assert world.num_asked == asked, "all are there"


async def test_a_failing_look_up_is_tried_again() -> None:
    world = World(1)
    world.broken = True
    async with world.running():
        await world.turns()
        world.broken, world.listed = False, ["a"]
        await world.turns()
        assert world.schedulers.living == ("a",)


async def test_the_only_one_is_tried_again_soon_however_often_it_was_lost() -> None:
    async with World(1).running() as world:
        world.listed = ["a"]
        await world.turns()
        for _ in range(6):
            lost_at = world.clock.moment
            assert world.schedulers.lose("a")
            assert not world.schedulers.lose("a")
            await world.turns()
            assert 0.2 <= world.found[-1][1] - lost_at < 0.5


async def test_one_that_keeps_away_is_left_alone_longer_and_longer() -> None:
    async with World(2).running() as world:
        world.listed = ["a", "b"]
        await world.turns()
        waits: list[float] = []
        for _ in range(7):
            lost_at = world.clock.moment
            world.schedulers.lose("a")
            while "a" not in world.schedulers.living:
                await world.turns(1)
            waits.append(world.found[-1][1] - lost_at)
        assert waits[0] < 1.0
        assert 3.0 < waits[-1] <= 10.0
        world.listed = ["b", "c"]
        world.schedulers.lose("a")
        await world.turns()
        assert world.schedulers.living == ("b", "c"), "another has come for it, and is not made to wait"


async def test_a_spare_is_asked_for_places_once_the_first_is_lost() -> None:
    async with World(1, num_spares=1).running() as world:
        world.listed = ["b"]
        await world.turns()
        assert world.schedulers.placing == ("b",)
        world.listed = ["a", "b"]
        await world.turns(100)
        assert world.schedulers.living == ("a", "b")
        assert world.schedulers.placing == ("b",), "what was found first stays"
        world.schedulers.lose("b")
        assert world.schedulers.placing == ("a",)
        world.listed = ["0", "a"]
        await world.turns(100)
        assert world.schedulers.living == ("0", "a")
        assert world.schedulers.placing == ("a",), "what comes in its place is the spare"


async def test_of_several_schedulers_all_are_asked_for_places() -> None:
    async with World(2).running() as world:
        world.listed = ["b", "c"]
        await world.turns()
        assert world.schedulers.placing == world.schedulers.living == ("b", "c")


def test_turns_go_round() -> None:
    names = ("a", "b", "c")
    orders = [in_turn(names, "i", number) for number in range(6)]
    assert all(sorted(order) == sorted(names) for order in orders)
    assert [order[0] for order in orders[:3]] != [orders[0][0]] * 3
    assert {order[0] for order in orders[:3]} == set(names)
    assert orders[:3] == orders[3:]
    assert in_turn(("a",), "i", 7) == ["a"]
