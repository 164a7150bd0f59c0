"""What is late leaves half of each instance to those that can still be in time."""

from dataclasses import replace

import pytest

from cluster.scheduler.placement.late_headroom import LateHeadroom
from cluster.scheduler.queue.waiting_queue import Waiter
from cluster.scheduler.scheduler_events import RequestArrived, Send
from core.cost.steps import UNKNOWN_STEPS, StepModel, StepModels
from core.messages import Finished, PlaceReply
from core.reports import LoadReport
from core.types import Slo
from tests.cluster.scheduler.routing_world import World, ask, instance, report

TTFT_S = 0.5
LATE_S = 1e-4
"""No instance gives a first token so soon."""
STEPS = StepModels(StepModel(fixed_s=0.01, seq_s=0.01, num_steps=100))
"""Alone a sequence takes 20 ms, and nine of them the 100 that the target leaves."""


def waiter(name: str, priority: int = 0, due_at: float = 0.0) -> Waiter:
    place = ask(name, 20).place
    return Waiter(
        name, "f", replace(place, slo=replace(place.slo, priority=priority)), 0.0, number=1, due_at=due_at
    )


def wants(name: str, ttft_s: float = TTFT_S, num_tokens: int = 20) -> RequestArrived:
    arrived = ask(name, num_tokens, 100)
    return replace(arrived, place=replace(arrived.place, slo=Slo(ttft_s=ttft_s, tpot_s=0.1)))


def placed(actions: list[Send]) -> list[str]:
    return [send.message.request_id for send in actions if isinstance(send.message, PlaceReply)]


def test_nothing_is_left_where_none_comes_that_can_be_in_time() -> None:
    headroom = LateHeadroom()
    assert headroom.asked(waiter("late"), 1.0) == 0.0
    assert headroom.asked(waiter("timely", due_at=2.0), 1.0) == 0.0
    assert headroom.share(waiter("late"), 30.9) == 0.5
    assert headroom.share(waiter("late"), 31.1) == 0.0


def test_it_is_left_to_its_own_class_and_to_higher_ones() -> None:
    headroom = LateHeadroom()
    headroom.asked(waiter("timely", due_at=2.0), 1.0)
    assert headroom.share(waiter("late", priority=-1), 1.1) == 0.5
    assert headroom.share(waiter("late", priority=1), 1.1) == 0.0


def running(num_seqs: int, *, free_blocks: int = 900, with_steps: bool = False) -> LoadReport:
    return report(
        "d",
        num_running=num_seqs,
        num_decoding=num_seqs,
        context_tokens=20 * num_seqs,
        free_blocks=free_blocks,
        steps=STEPS if with_steps else UNKNOWN_STEPS,
        received=("first#0", "timely#0", "late#0"),
    )


@pytest.mark.parametrize(
    ("fuller", "freer"),
    [
        (running(8), running(7)),
        (running(2, free_blocks=500), running(2, free_blocks=550)),
        (running(5, with_steps=True), running(3, with_steps=True)),
    ],
    ids=["slots", "blocks", "time of a step"],
)
def test_it_takes_no_more_than_half_of_an_instance(fuller: LoadReport, freer: LoadReport) -> None:
    world = World(instance("d"))
    world.placed(wants("first"))
    world.on(fuller)
    assert world.on(wants("late", LATE_S)) == []
    assert placed(world.on(wants("timely"))) == ["timely"], "to one in time it is not full"
    world.on(Finished("timely", 0, 100, complete=True))
    assert world.on(fuller) == []
    assert placed(world.on(freer)) == ["late"]


def test_it_takes_all_where_none_has_come_in_time_for_a_while() -> None:
    world = World(instance("d"))
    world.placed(wants("first"))
    world.on(running(12))
    assert world.on(wants("late", LATE_S)) == []
    assert world.on(running(12), after_s=29.8) == []
    assert placed(world.on(running(12), after_s=0.4)) == ["late"]


def test_an_idle_instance_has_room_for_any_request() -> None:
    world = World(instance("d", num_blocks=10))
    world.placed(wants("timely"))
    world.on(Finished("timely", 0, 100, complete=True))
    assert len(world.on(wants("late", LATE_S, num_tokens=100))) == 1
