"""The global scheduler's decisions when instances and frontends are lost, cancel, ask twice or need another prefill instance."""

import pytest

from cluster.scheduler.scheduler_events import PeerLost, PrefillNeeded, Send
from core.messages import Finished, Leaving, NeedPrefill, PrefillAssigned
from tests.cluster.scheduler.routing_world import World, ask, instance, report, route_of


def test_excluded_instances_are_avoided_while_there_are_others() -> None:
    world = World(instance("d1"), instance("d2"), instance("p1", "p"), instance("p2", "p"))
    gone = ("d1", "p1")
    assert {world.placed(ask(f"a{i}", exclude=gone)) for i in range(3)} == {"p2>d2"}
    world.on(PeerLost("d2"))
    assert world.placed(ask("b", exclude=gone)) in ("p2>d1", "d1")


@pytest.mark.parametrize("fleet_is_large", [False, True])
def test_the_other_instance_of_a_lost_ones_card_is_avoided_while_there_are_others(
    fleet_is_large: bool,
) -> None:
    fleet = [instance(f"{role}{card}", role, card=f"c{card}") for card in (1, 2) for role in "pd"]
    world = World(*fleet, *(instance(f"q{n}", "p", num_blocks=1) for n in range(40 * fleet_is_large)))
    world.on(PeerLost("d1"))
    routes = {world.placed(ask(f"a{i}", attempt=1, exclude=("d1",))) for i in range(3)}
    assert routes == {"p2>d2"}
    world.on(PeerLost("p2"))
    assert world.placed(ask("b", attempt=1, exclude=("d1",))) in ("p1>d2", "d2")


def test_an_excluded_instance_is_used_when_it_is_the_only_one_that_decodes() -> None:
    world = World(instance("d"), instance("p", "p"))
    assert world.placed(ask("a", attempt=1, exclude=("d",))) == "p>d"


def test_what_only_a_lost_instance_could_hold_is_not_the_clients_fault() -> None:
    world = World(instance("d", num_blocks=40), instance("big", num_blocks=400))
    world.on(PeerLost("big"))
    assert world.on(ask("a", 3000)) == []
    (action,) = world.on(instance("big", num_blocks=400, incarnation="2"))
    assert route_of(action) == "big"


def test_nothing_is_placed_where_it_could_not_be_finished() -> None:
    world = World(instance("small", num_blocks=25), instance("big", num_blocks=200))
    world.on(report("small", free_blocks=25, cache_added=ask("x", 100, prefix=1).place.block_hashes))
    assert [world.placed(ask(name, 100, 1000, prefix=1)) for name in "ab"] == ["big", "big"]


def test_an_instance_that_hung_gets_nothing_more_and_is_counted_also_when_it_is_gone() -> None:
    world = World(instance("d1"), instance("d2"))
    world.on(Leaving("d1", hung=True))
    world.on(Leaving("d2"))
    world.on(instance("d3"))
    assert {world.placed(ask(name)) for name in "abc"} == {"d3"}
    world.on(PeerLost("d1"))
    assert world.scheduler.status().num_hung == 1


def test_a_lost_instance_gets_nothing_and_its_reservations_are_gone() -> None:
    world = World(instance("d1"), instance("d2"))
    routes = {name: world.placed(ask(name)) for name in "ab"}
    world.on(PeerLost("d1"))
    assert world.scheduler.num_placed == 1
    assert world.placed(ask("c")) == "d2"
    for name in routes:
        world.on(Finished(name, 0))
    world.on(Finished("c", 0))
    assert [m.num_reservations for m in world.scheduler.members] == [0]


def test_a_restarted_instance_starts_with_a_clean_slate() -> None:
    world = World(instance("d", num_blocks=40), instance("p", "p"))
    request = ask("a", 400, prefix=1)
    world.on(report("d", free_blocks=40, cache_added=request.place.block_hashes))
    world.placed(request)
    world.on(instance("d", num_blocks=40, incarnation="2"))
    assert [m.num_reservations for m in world.scheduler.members if m.address == "d"] == [0]
    assert world.placed(ask("b", 400, prefix=1)) == "p>d"


def test_registering_again_changes_nothing() -> None:
    world = World(instance("d"))
    world.placed(ask("a"))
    world.on(instance("d"))
    assert [m.num_reservations for m in world.scheduler.members] == [1]


def test_reports_of_strangers_are_ignored() -> None:
    world = World()
    assert world.on(report("who", cache_added=(1,))) == []
    assert world.scheduler.members == ()


def test_a_lost_frontend_takes_its_requests_along() -> None:
    world = World(instance("d", max_num_seqs=1))
    world.placed(ask("a", frontend="f1"))
    world.on(ask("b", frontend="f1"))
    world.on(ask("c", frontend="f2"))
    (action,) = world.on(PeerLost("f1"))
    assert (action.to, route_of(action)) == ("f2", "d")
    assert world.scheduler.num_queued == 0
    assert world.scheduler.num_placed == 1


def test_asking_twice_is_answered_with_the_same_place() -> None:
    world = World(instance("d1"), instance("d2"))
    assert world.placed(ask("a")) == world.placed(ask("a")) == "d1"
    assert world.scheduler.num_placed == 1


def test_asking_twice_while_waiting_makes_one_waiter() -> None:
    world = World(instance("d", max_num_seqs=1))
    world.placed(ask("running"))
    world.on(ask("a"))
    world.on(ask("a"))
    assert world.scheduler.num_queued == 1


def test_a_cancelled_waiter_is_never_placed() -> None:
    world = World(instance("d", max_num_seqs=1))
    world.placed(ask("running"))
    world.on(ask("a"))
    world.on(Finished("a", 0))
    assert world.on(Finished("running", 0)) == []


def need(lost: str, attempt: int = 0, num_tokens: int = 400) -> PrefillNeeded:
    return PrefillNeeded(
        "d", NeedPrefill(request_id="a", attempt=attempt, epoch=1, num_tokens=num_tokens, lost=lost)
    )


@pytest.mark.parametrize("alive", [True, False])
def test_a_reservation_gets_another_prefill_instance(alive: bool) -> None:
    world = World(instance("d"), instance("p1", "p"), instance("p2", "p"))
    assert world.placed(ask("a")) == "p1>d"
    if not alive:
        world.on(PeerLost("p1"))
    assert world.on(need("p1")) == [Send("d", PrefillAssigned("a", 0, 1, "p2"))]
    assert {m.address: m.num_reservations for m in world.scheduler.members if m.num_reservations} == {
        "d": 1,
        "p2": 1,
    }
    world.on(Finished("a", 0))
    assert not any(m.num_reservations for m in world.scheduler.members)


def test_decode_computes_itself_when_there_is_no_other() -> None:
    world = World(instance("d"), instance("p1", "p"))
    world.placed(ask("a"))
    assert world.on(need("p1")) == [Send("d", PrefillAssigned("a", 0, 1, ""))]


def test_the_little_that_is_missing_is_computed_by_decode() -> None:
    world = World(instance("d"), instance("p1", "p"), instance("p2", "p"))
    world.placed(ask("a"))
    assert world.on(need("p1", num_tokens=20)) == [Send("d", PrefillAssigned("a", 0, 1, ""))]


def test_a_need_of_an_unknown_request_is_answered() -> None:
    world = World(instance("d"), instance("p1", "p"))
    assert world.on(need("p9")) == [Send("d", PrefillAssigned("a", 0, 1, ""))]


def test_the_log_names_every_decision_without_times() -> None:
    world = World(instance("d"), instance("p", "p"))
    world.on(ask("a"))
    world.on(need("p"))
    world.on(ask("b", 99_999))
    assert world.log == ["place a#0 p d", "prefill a#0 local d", "reject b#0 never"]
