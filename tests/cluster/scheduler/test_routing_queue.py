"""The global scheduler's decisions: who waits for room, and in which order they get it."""

from cluster.scheduler.scheduler_events import Tick
from core.messages import Finished, PlaceReply
from core.scheduler_tuning import DEFAULT_TUNING as TUNING
from tests.cluster.scheduler.routing_world import World, ask, instance, report, route_of


def test_a_request_waits_for_blocks_and_is_placed_when_they_are_free() -> None:
    world = World(instance("d", num_blocks=40))
    world.placed(ask("a", 400, 64))
    assert world.on(ask("b", 400, 64)) == []
    (action,) = world.on(Finished("a", 0))
    assert isinstance(action.message, PlaceReply)
    assert (action.message.request_id, action.message.attempt) == ("b", 0)


def test_blocks_for_the_output_are_part_of_the_headroom() -> None:
    world = World(instance("d", num_blocks=58))
    world.placed(ask("a", 400, 16))
    assert world.on(ask("b", 400, 200)) == []
    assert len(world.on(ask("c", 400, 100))) == 1


def test_sequence_slots_are_part_of_the_headroom() -> None:
    world = World(instance("d", max_num_seqs=2))
    world.placed(ask("a", 20))
    world.placed(ask("b", 20))
    assert world.on(ask("c", 20)) == []
    assert len(world.on(Finished("b", 0))) == 1


def test_a_report_that_shows_room_is_enough() -> None:
    world = World(instance("d1"), instance("d2"))
    for address in ("d1", "d2"):
        world.on(report(address, free_blocks=1))
    assert world.on(ask("a")) == []
    assert world.on(report("d2", free_blocks=2)) == []
    assert [route_of(action) for action in world.on(report("d1"))] == ["d1"]


def test_a_report_supersedes_old_reservations_but_not_fresh_ones() -> None:
    world = World(instance("d", num_blocks=100))
    world.placed(ask("a", 800, 0))
    full = report("d", free_blocks=50, num_running=1)
    world.on(full)
    (member,) = world.scheduler.members
    assert member.free_blocks == 0  # counted twice: the report may or may not show the reservation
    world.on(full, after_s=1.0)
    assert member.free_blocks == 50


def test_room_for_growth_is_kept_until_the_sequence_has_grown() -> None:
    world = World(instance("d", num_blocks=100))
    world.placed(ask("a", 800, 160))
    world.on(report("d", free_blocks=50), after_s=1.0)
    (member,) = world.scheduler.members
    assert member.free_blocks == 40
    world.on(report("d", free_blocks=41, grown=(("a#0", 160),)))
    assert member.free_blocks == 40


def test_a_shared_prefix_is_paid_for_once() -> None:
    world = World(instance("d", num_blocks=100))
    first = ask("a", 800, 16, prefix=1)
    world.placed(first)
    world.on(report("d", free_blocks=49, cache_added=first.place.block_hashes), after_s=1.0)
    for name in "bcd":
        assert world.placed(ask(name, 816, 16, prefix=1)) == "d"


def test_prompts_wait_here_while_prefill_has_work_for_a_while() -> None:
    world = World(instance("d", max_num_seqs=64, num_blocks=10_000), instance("p", "p"))
    world.on(report("d", num_running=30))
    world.on(report("p"))
    placed = [action for i in range(10) for action in world.on(ask(f"r{i}", 1000))]
    assert [route_of(a) for a in placed] == ["p>d"] * 5
    assert world.scheduler.num_queued == 5
    assert len(world.on(report("p", waiting_tokens=0), after_s=1.0)) == 5


def drain(world: World, *running: str) -> list[str]:
    """Finish one request after the other; the order in which the others are placed."""
    queue, order = list(running), []
    while queue:
        for action in world.on(Finished(queue.pop(0), 0), after_s=0.1):
            assert isinstance(action.message, PlaceReply)
            order.append(action.message.request_id)
            queue.append(action.message.request_id)
    return order


def test_higher_priority_goes_first_then_arrival() -> None:
    world = World(instance("d", max_num_seqs=1))
    world.placed(ask("running", priority=2))
    for name, priority in (("low", -1), ("n1", 0), ("high", 2), ("n2", 0)):
        world.on(ask(name, priority=priority))
    assert drain(world, "running") == ["high", "n1", "n2", "low"]


def test_waiting_makes_up_for_priority() -> None:
    world = World(instance("d", max_num_seqs=1))
    world.placed(ask("running", priority=2))
    world.on(ask("low", priority=-1, ttft_s=3600.0))
    world.on(Tick(), after_s=35.0)
    world.on(ask("high", priority=1))
    assert drain(world, "running") == ["low", "high"]


def test_a_higher_class_takes_a_slot_of_a_lower_one_that_takes_none_back() -> None:
    world = World(instance("d", max_num_seqs=2))
    world.placed(ask("low", priority=-1))
    world.placed(ask("high", priority=1))
    assert world.placed(ask("second high", priority=1)) == "d"
    assert world.on(ask("third high", priority=1)) == []
    assert world.on(ask("second low", priority=-1)) == []
    (action,) = world.on(Finished("high", 0))
    assert isinstance(action.message, PlaceReply)
    assert (action.message.request_id, action.message.attempt) == ("third high", 0)


def test_a_higher_class_takes_blocks_of_a_lower_one_only_where_none_are_free() -> None:
    world = World(instance("d1", num_blocks=100), instance("d2", num_blocks=100))
    (low,) = {"d1", "d2"} - {world.placed(ask("filler", 1200, 16))}
    assert world.placed(ask("low", 1200, 16, priority=-1)) == low
    world.on(Finished("filler", 0))
    assert world.placed(ask("high", 1200, 16, priority=1)) != low
    assert world.placed(ask("second high", 1200, 16, priority=1)) == low
    assert world.on(ask("third high", 1200, 16, priority=1)) == []


def test_a_higher_class_finds_lower_ones_in_a_large_fleet() -> None:
    world = World(*(instance(f"d{i}", max_num_seqs=1) for i in range(40)))
    for i in range(39):
        world.placed(ask(f"r{i}"))
    low = world.placed(ask("low", priority=-1))
    assert world.on(ask("another", priority=-1)) == []
    assert world.placed(ask("high")) == low


def test_a_request_that_lost_its_instance_goes_before_its_peers() -> None:
    world = World(instance("d", max_num_seqs=1))
    world.placed(ask("running"))
    world.on(ask("fresh"))
    world.on(ask("again", attempt=1), after_s=1.0)
    (action,) = world.on(Finished("running", 0))
    assert isinstance(action.message, PlaceReply)
    assert (action.message.request_id, action.message.attempt) == ("again", 1)


def test_small_requests_pass_a_big_one_but_not_for_ever() -> None:
    world = World(instance("d", num_blocks=100))
    world.placed(ask("s0", 640, 0))
    assert world.on(ask("big", 1440, 0)) == []
    assert world.placed(ask("s1", 640, 0)) == "d"
    world.on(Finished("s0", 0), after_s=TUNING.patience_s)
    assert world.log[-1] == "claim big#0 d"
    assert world.on(ask("s2", 640, 0)) == []
    (action, *_) = world.on(Finished("s1", 0))
    assert isinstance(action.message, PlaceReply)
    assert action.message.request_id == "big"
    (action,) = world.on(Finished("big", 0))
    assert isinstance(action.message, PlaceReply)
    assert action.message.request_id == "s2"


def test_a_claim_keeps_one_instance_only_and_ends_with_its_claimant() -> None:
    world = World(instance("d1", num_blocks=100), instance("d2", num_blocks=100))
    for name in ("a", "b"):
        world.placed(ask(name, 640, 0))
    world.on(ask("big", 1600, 0))
    world.on(Tick(), after_s=TUNING.patience_s)
    assert world.log[-1] == "claim big#0 d1"
    assert world.placed(ask("c", 320, 0)) == "d2"
    assert world.placed(ask("d", 320, 0)) == "d2"
    assert world.on(ask("e", 640, 0)) == []
    (action,) = world.on(Finished("big", 0))
    assert route_of(action) == "d1"


def test_room_is_kept_for_outputs_as_long_as_they_have_been() -> None:
    def placed_beside(usual_tokens: int) -> int:
        world = World(instance("d", num_blocks=200, max_num_seqs=64))
        for i in range(30):
            world.placed(ask(f"past{i}", 16, 3000))
            world.on(Finished(f"past{i}", 0, usual_tokens, complete=True))
        for i in range(40):
            world.on(ask(f"r{i}", 160, 1600))
        return world.scheduler.num_placed

    assert placed_beside(30) >= 14
    assert placed_beside(1600) == 1


def test_a_flood_of_one_tenant_does_not_hold_another_up() -> None:
    world = World(instance("d", max_num_seqs=4))
    for i in range(40):
        world.on(ask(f"flood{i}", tenant="a"))
    world.on(ask("polite", tenant="b"))
    order = drain(world, *(f"flood{i}" for i in range(4)))
    assert order.index("polite") <= 1
