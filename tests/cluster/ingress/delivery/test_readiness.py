"""Readiness: at once at the start, through a short absence, and not to and fro."""

import asyncio

import pytest

from cluster.ingress.delivery.readiness import COVERED_S, STEADY_S, Readiness
from core.clock import WallClock
from tests.cluster.ingress.delivery.test_frontend import World

LOST = "the scheduler did not answer"


def after(*looks: tuple[float, str]) -> str:
    readiness = Readiness()
    for now, why_not in looks:
        readiness.saw(why_not, now)
    return readiness.why_not


def test_it_begins_unready_and_is_ready_at_the_first_good_look() -> None:
    assert after()
    assert after((0.0, "no instance")) == "no instance"
    assert after((0.0, "no instance"), (0.1, "")) == ""


@pytest.mark.parametrize("why_not", [LOST, "no decode instance is running"])
def test_a_short_absence_is_covered(why_not: str) -> None:
    looks = [(0.0, ""), *((at, why_not) for at in (1.0, 3.0, 1.0 + COVERED_S - 0.1))]
    assert after(*looks) == ""
    assert after(*looks, (1.0 + COVERED_S, why_not)) == why_not


def test_absences_that_end_do_not_add_up() -> None:
    looks = [(float(at), LOST if at % 4 else "") for at in range(100)]
    assert after(*looks) == ""


def test_after_a_long_absence_it_is_ready_once_all_has_been_well_for_a_while() -> None:
    gone = [(0.0, ""), (1.0, LOST), (1.0 + COVERED_S, LOST)]
    assert after(*gone, (20.0, "")) == LOST
    assert after(*gone, (20.0, ""), (20.1, LOST), (20.2, ""), (20.1 + STEADY_S, "")) == LOST
    assert after(*gone, (20.0, ""), (20.0 + STEADY_S, "")) == ""


def test_one_look_after_a_long_silence_says_nothing_of_the_time_between() -> None:
    assert after((0.0, ""), (1000.0, LOST)) == ""


class ShiftedClock(WallClock):
    shift_s = 0.0

    def now(self) -> float:
        return super().now() + self.shift_s


async def test_a_frontend_stays_ready_while_its_scheduler_is_away_for_a_moment() -> None:
    clock = ShiftedClock()
    world = World(clock)
    await asyncio.sleep(0.01)
    assert await world.frontend.ready() == (True, "")
    await world.scheduler.mail.close()
    await asyncio.sleep(0.01)
    assert await world.frontend.ready() == (True, "")
    clock.shift_s = COVERED_S
    assert await world.frontend.ready() == (False, "the scheduler is not known yet")
    world.runner.cancel()
    await world.frontend.close()
