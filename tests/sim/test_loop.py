import asyncio

import pytest

from core.errors import Bug
from sim.virtual_loop import LoopClock, run_virtual


def test_hours_pass_in_no_time_and_in_order() -> None:
    clock = LoopClock()
    seen: list[tuple[float, str]] = []

    async def at(delay_s: float, name: str) -> None:
        await clock.sleep(delay_s)
        seen.append((clock.now(), name))

    async def main() -> float:
        await asyncio.gather(at(7200, "c"), at(0.5, "a"), at(3600, "b"))
        return clock.now()

    assert run_virtual(main()) == 7200
    assert seen == [(0.5, "a"), (3600, "b"), (7200, "c")]


def test_deadlines_are_virtual_too() -> None:
    async def main() -> float:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(1000):
                await asyncio.sleep(5000)
        return asyncio.get_running_loop().time()

    assert run_virtual(main()) == 1000


def test_a_deadlock_is_said_not_waited_for() -> None:
    async def main() -> None:
        await asyncio.Event().wait()

    with pytest.raises(Bug, match="stands still"):
        run_virtual(main())
