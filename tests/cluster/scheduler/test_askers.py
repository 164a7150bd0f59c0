"""Frontends that ask for the same request, since its client has sent it to several, have the same answer, and it counts once."""

from cluster.scheduler.scheduler_events import PeerLost, RequestLeft, Send, Tick
from core.messages import Finished, PlaceReply, Rejected
from tests.cluster.scheduler.routing_world import World, ask, instance
from tests.cluster.scheduler.test_scheduler_peers import Ring


def full() -> World:
    """One request fills the only instance, another one waits."""
    world = World(instance("d", num_blocks=40, max_num_seqs=1))
    world.placed(ask("runs", 400, frontend="r"))
    assert world.on(ask("a", 400, frontend="f")) == []
    return world


def told(actions: list[Send]) -> dict[str, type[object]]:
    return {action.to: type(action.message) for action in actions}


def test_all_that_ask_for_what_waits_are_told_of_its_place() -> None:
    world = full()
    assert world.on(ask("a", 400, frontend="g")) == []
    assert world.on(ask("a", 400, frontend="g")) == [], "it has asked again, since it had no answer"
    assert world.scheduler.num_queued == 1
    actions = world.on(Finished("runs", 0))
    assert told(actions) == {"f": PlaceReply, "g": PlaceReply}
    assert len(actions) == 2
    assert len({action.message for action in actions}) == 1
    assert world.scheduler.num_placed == 1


def test_all_that_ask_for_what_waits_too_long_are_refused() -> None:
    world = full()
    world.on(ask("a", 400, frontend="g"))
    assert told(world.on(Tick(), after_s=61.0)) == {"f": Rejected, "g": Rejected}
    assert told(world.on(Finished("runs", 0))) == {}
    assert told(world.on(ask("a", 400, frontend="g"))) == {"g": PlaceReply}, "nobody else asks for it now"


def test_what_waits_goes_on_waiting_for_those_that_have_not_left() -> None:
    for leaves in (RequestLeft("f", Finished("a", 0)), PeerLost("f")):
        world = full()
        world.on(ask("a", 400, frontend="g"))
        assert world.on(leaves) == []
        assert world.scheduler.num_queued == 1
        assert told(world.on(Finished("runs", 0))) == {"g": PlaceReply}
        world.on(RequestLeft("g", Finished("a", 0, 64, complete=True)))
        assert world.scheduler.num_placed == 0


def test_what_was_placed_is_reserved_until_the_last_has_left_or_it_is_complete() -> None:
    for leaves, complete in ((RequestLeft("f", Finished("a", 0, 3)), False), (PeerLost("f"), True)):
        world = World(instance("d"))
        for frontend in ("f", "g", "h"):
            assert told(world.on(ask("a", frontend=frontend))) == {frontend: PlaceReply}
        world.on(leaves)
        (placed,) = world.scheduler.placements
        assert placed.frontend == "g"
        world.on(RequestLeft("g", Finished("a", 0, 9, complete=complete)))
        assert world.scheduler.num_placed == (0 if complete else 1)
        world.on(RequestLeft("h", Finished("a", 0, 9, complete=complete)))
        assert world.scheduler.num_placed == 0


def test_what_another_scheduler_has_placed_does_not_wait_any_more() -> None:
    ring = Ring("s1", "s2", instances=1, num_blocks=40, max_num_seqs=1)
    ring.on("s1", ask("runs", 400))
    ring.deliver()
    assert ring.on("s1", ask("a", 400, frontend="f")) == []
    assert ring.on("s2", ask("a", 400, frontend="g")) == []
    assert told(ring.on("s1", instance("d9")))["f"] is PlaceReply, "which the other one has not heard of yet"
    assert told(ring.deliver()) == {"g": PlaceReply}
    ring.on("s2", RequestLeft("g", Finished("a", 0, 3)))
    ring.deliver()
    assert [one.num_placed for one in ring.schedulers.values()] == [2, 2], "the other one reads it still"
    ring.on("s1", RequestLeft("f", Finished("a", 0, 3)))
    ring.deliver()
    assert [one.num_placed for one in ring.schedulers.values()] == [1, 1]


def test_a_request_of_one_frontend_ends_when_that_leaves() -> None:
    world = full()
    world.on(RequestLeft("f", Finished("a", 0)))
    assert world.scheduler.num_queued == 0
    assert told(world.on(RequestLeft("r", Finished("runs", 0)))) == {}
    assert world.scheduler.num_placed == 0
