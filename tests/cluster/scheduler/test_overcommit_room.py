"""Requests are placed on blocks that the sequences of an instance give up for one another."""

from dataclasses import replace

from tests.cluster.scheduler.routing_world import World, ask, instance, report


def overcommit(num_blocks: int, overcommit_blocks: int) -> World:
    return World(replace(instance("d", num_blocks=num_blocks), overcommit_blocks=overcommit_blocks))


def test_more_are_placed_than_the_pool_holds_as_far_as_others_pause() -> None:
    world = overcommit(num_blocks=100, overcommit_blocks=50)
    world.placed(ask("a", 1200, 16))
    assert world.on(ask("b", 480, 16)) == [], "nobody pauses yet"
    assert (
        len(world.on(report("d", free_blocks=24, num_running=1, pausable_blocks=76, received=("a#0",)))) == 1
    )
    (member,) = world.scheduler.members
    assert member.free_blocks <= 150 - 76 - 31


def test_no_more_are_placed_than_overcommit_allows() -> None:
    world = overcommit(num_blocks=100, overcommit_blocks=10)
    world.placed(ask("a", 1200, 16))
    shown = report("d", free_blocks=24, num_running=1, pausable_blocks=76, received=("a#0",))
    world.on(shown)
    assert world.on(ask("b", 600, 16)) == []
    assert len(world.on(ask("c", 400, 16))) == 1


def test_without_overcommit_a_pool_is_all_there_is() -> None:
    world = overcommit(num_blocks=100, overcommit_blocks=0)
    world.placed(ask("a", 1200, 16))
    world.on(report("d", free_blocks=24, num_running=1, pausable_blocks=76, received=("a#0",)))
    assert world.on(ask("b", 400, 16)) == []
