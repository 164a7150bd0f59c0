"""What is late takes no place while those that can be in time lack one."""

from dataclasses import replace
from math import inf

from cluster.scheduler.placement.scarcity import Scarcity
from cluster.scheduler.scheduler_events import Send
from core.messages import Finished, Placed
from core.types import Slo
from tests.cluster.scheduler.routing_world import World, ask, instance, report

LIVES_S = 4.0


def placed(actions: list[Send]) -> list[str]:
    return [send.message.request_id for send in actions if isinstance(send.message, Placed)]


def test_places_are_scarce_for_the_life_of_a_sequence_after_a_lack() -> None:
    scarcity = Scarcity()
    assert not scarcity.is_felt(0, 2.0)
    scarcity.note(0, LIVES_S, 2.0)
    assert scarcity.is_felt(0, 2.0 + 0.9 * LIVES_S)
    assert not scarcity.is_felt(0, 2.0 + 1.1 * LIVES_S)


def test_what_lower_classes_lack_keeps_back_no_higher_one() -> None:
    scarcity = Scarcity()
    scarcity.note(0, LIVES_S, 2.0)
    assert scarcity.is_felt(-1, 2.1)
    assert not scarcity.is_felt(1, 2.1)


def test_nothing_is_scarce_while_it_is_not_known_how_long_outputs_are() -> None:
    scarcity = Scarcity()
    scarcity.note(0, inf, 2.0)
    assert not scarcity.is_felt(0, 2.0)


def test_a_late_request_waits_while_others_lack_slots_and_is_placed_when_they_do_not() -> None:
    world = World(instance("d", max_num_seqs=2))
    world.on(report("d", step_s=0.04))
    for number in range(30):
        world.placed(ask(f"old{number}", 20))
        world.on(Finished(f"old{number}", 0, 100, complete=True))
    for name in ("a", "b"):
        world.placed(ask(name, 20, 100))
    soon = ask("late", 20, 100)
    assert world.on(replace(soon, place=replace(soon.place, slo=Slo(ttft_s=0.5)))) == []
    world.on(report("d"), after_s=3.0)
    assert world.on(ask("timely", 20, 100)) == []
    assert placed(world.on(Finished("a", 0, 100, complete=True))) == ["timely"]
    assert world.on(Finished("b", 0, 100, complete=True)) == [], "a place is left for those in time"
    assert placed(world.on(report("d"), after_s=LIVES_S)) == ["late"]
