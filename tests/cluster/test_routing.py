"""The global scheduler's decisions, event by event."""

from collections import Counter

import pytest

from cluster.admission import NO_DECODE_WAIT_S
from cluster.events import PeerLost, PrefillNeeded, Send, Tick
from cluster.placing import PATIENCE_S
from core.messages import Finished, NeedPrefill, Placed, PrefillAssigned
from tests.cluster.routing_world import World, ask, instance, report, route_of


# --- disaggregated or local ----------------------------------------------------------------------------------------
def test_a_long_prompt_is_disaggregated_and_a_short_one_is_not() -> None:
    world = World(instance("d"), instance("p", "p"))
    assert world.placed(ask("long", 400)) == "p>d"
    assert world.placed(ask("short", 32)) == "d"


def test_the_threshold_is_the_configured_one() -> None:
    world = World(instance("d"), instance("p", "p"), local_threshold_tokens=500)
    assert world.placed(ask("a", 500)) == "d"
    assert world.placed(ask("b", 501)) == "p>d"


def test_what_counts_as_short_is_what_decode_has_not_cached() -> None:
    world = World(instance("d"), instance("p", "p"))
    tail = ask("x", 416, prefix=1)
    world.on(report("d", cache_added=tail.place.block_hashes[:24]))
    assert world.placed(tail) == "d"


def test_without_prefill_instances_everything_is_local() -> None:
    world = World(instance("d1"), instance("d2"))
    assert {world.placed(ask("a")), world.placed(ask("b"))} == {"d1", "d2"}


def test_prompts_go_local_while_prefill_is_far_behind_and_decode_idle() -> None:
    world = World(instance("d"), instance("p", "p"))
    world.on(report("p", waiting_tokens=100_000))
    assert world.placed(ask("a")) == "d"


def test_a_busy_decode_instance_is_spared_a_local_prompt() -> None:
    world = World(instance("d", max_num_seqs=64), instance("p", "p"))
    world.on(report("p", waiting_tokens=2000))
    world.on(report("d", num_running=40))
    assert world.placed(ask("a")) == "p>d"


# --- prefix affinity and spreading ---------------------------------------------------------------------------------
def test_prompts_follow_their_prefix() -> None:
    world = World(instance("d"), instance("p1", "p"), instance("p2", "p"))
    world.on(report("p2", cache_added=ask("x", 1600, prefix=1).place.block_hashes))
    assert world.placed(ask("a", 1600, prefix=1)) == "p2>d"


def test_a_burst_with_one_prefix_does_not_pile_up_on_its_holder() -> None:
    prefills = [instance(f"p{i}", "p") for i in range(4)]
    world = World(instance("d", max_num_seqs=64), *prefills)
    world.on(report("p0", cache_added=ask("x", 320, prefix=1).place.block_hashes))
    sources = Counter(world.placed(ask(f"r{i}", 1600 + 16 * i, prefix=1)).split(">")[0] for i in range(8))
    assert sources["p0"] >= 2
    assert len(sources) == 4


def test_a_prefix_is_fetched_from_the_decode_instance_that_has_it_when_that_is_full() -> None:
    def placed(sends: bool) -> str:
        holder = instance("d0", max_num_seqs=1, sends=sends)
        world = World(instance("p0", "p"), holder, instance("d1", sends=sends))
        first = ask("a", 1600, prefix=3)
        world.placed(first)
        world.on(report("d0", cache_added=first.place.block_hashes, num_running=1))
        return world.placed(ask("b", 1616, prefix=3))

    assert placed(sends=True) == "d0>d1"
    assert placed(sends=False) == "p0>d1"


def test_a_fetch_that_costs_more_than_computing_is_not_made() -> None:
    holder = instance("d0", max_num_seqs=1, sends=True, host="h2", kv_token_bytes=4 << 20)
    world = World(
        instance("p0", "p", kv_token_bytes=4 << 20),
        holder,
        instance("d1", sends=True, kv_token_bytes=4 << 20),
    )
    first = ask("a", 1600, prefix=3)
    world.placed(first)
    world.on(report("d0", cache_added=first.place.block_hashes, num_running=1))
    assert world.placed(ask("b", 1616, prefix=3)) == "d1"


def test_a_burst_is_spread_before_any_report_comes() -> None:
    world = World(*(instance(f"d{i}") for i in range(4)))
    assert Counter(world.placed(ask(f"r{i}", 100)) for i in range(8)) == {f"d{i}": 2 for i in range(4)}


def test_a_prefill_instance_on_the_same_host_is_preferred_for_heavy_kv() -> None:
    world = World(
        instance("d", host="h2", kv_token_bytes=1 << 18),
        *(instance(f"p{i}", "p", host=f"h{i}") for i in range(1, 9)),
    )
    assert world.placed(ask("a", 4000)) == "p2>d"


def test_a_link_slower_than_the_computation_is_worth_a_slower_prefill_instance() -> None:
    world = World(
        instance("d", host="h2", max_num_seqs=64, kv_token_bytes=1 << 20),
        instance("far", "p", host="h1"),
        instance("near", "p", host="h2"),
    )
    world.on(report("d", num_running=20))
    world.on(report("far", tokens_per_s=40_000.0))
    world.on(report("near", tokens_per_s=5_000.0))
    assert world.placed(ask("a", 4000)) == "near>d"


def test_a_prefill_instance_that_was_slow_once_is_not_shunned_for_ever() -> None:
    world = World(instance("d", max_num_seqs=64), instance("p1", "p"), instance("p2", "p"))
    world.on(report("d", num_running=20))
    world.on(report("p1", tokens_per_s=20.0))
    assert world.placed(ask("a", 4000)) == "p2>d"
    world.on(report("p2", received=("a#0",), waiting_tokens=4000))
    world.on(report("p1", tokens_per_s=0.0))
    assert world.placed(ask("b", 4000)) == "p1>d"


def test_jitter_in_what_was_measured_does_not_decide() -> None:
    world = World(instance("d1"), instance("d2"))
    world.on(report("d1", step_s=0.0201))
    world.on(report("d2", step_s=0.0200))
    assert world.placed(ask("a", 20)) == "d1"


# --- late binding and headroom -------------------------------------------------------------------------------------
def test_a_request_waits_for_blocks_and_is_placed_when_they_are_free() -> None:
    world = World(instance("d", num_blocks=40))
    world.placed(ask("a", 400, 64))
    assert world.on(ask("b", 400, 64)) == []
    (action,) = world.on(Finished("a", 0))
    assert action.message == Placed("b", 0, action.message.route)  # type: ignore[union-attr]


def test_blocks_for_the_output_are_part_of_the_headroom() -> None:
    world = World(instance("d", num_blocks=60))
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


def test_a_report_supersedes_old_promises_but_not_fresh_ones() -> None:
    world = World(instance("d", num_blocks=100))
    world.placed(ask("a", 800, 0))
    full = report("d", free_blocks=50, num_running=1)
    world.on(full)
    (member,) = world.scheduler.members
    assert member.free_blocks == 0  # counted twice: the report may or may not show the promise
    world.on(full, after_s=1.0)
    assert member.free_blocks == 50


def test_room_for_growth_is_kept_until_the_sequence_has_grown() -> None:
    world = World(instance("d", num_blocks=100))
    world.placed(ask("a", 800, 160))
    world.on(report("d", free_blocks=50), after_s=1.0)
    (member,) = world.scheduler.members
    assert member.free_blocks == 40
    world.on(report("d", free_blocks=30))
    assert member.free_blocks == 30


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
    assert [route_of(a) for a in placed] == ["p>d"] * 4
    assert world.scheduler.num_queued == 6
    assert len(world.on(report("p", waiting_tokens=0), after_s=1.0)) == 4


# --- order and fairness --------------------------------------------------------------------------------------------
def drain(world: World, *running: str) -> list[str]:
    """Finish one request after the other; the order in which the others are placed."""
    queue, order = list(running), []
    while queue:
        for action in world.on(Finished(queue.pop(0), 0), after_s=0.1):
            assert isinstance(action.message, Placed)
            order.append(action.message.request_id)
            queue.append(action.message.request_id)
    return order


def test_higher_priority_goes_first_then_arrival() -> None:
    world = World(instance("d", max_num_seqs=1))
    world.placed(ask("running"))
    for name, priority in (("low", -1), ("n1", 0), ("high", 2), ("n2", 0)):
        world.on(ask(name, priority=priority))
    assert drain(world, "running") == ["high", "n1", "n2", "low"]


def test_waiting_makes_up_for_priority() -> None:
    world = World(instance("d", max_num_seqs=1))
    world.placed(ask("running"))
    world.on(ask("low", priority=-1, ttft_s=3600.0))
    world.on(Tick(), after_s=35.0)
    world.on(ask("high", priority=1))
    assert drain(world, "running") == ["low", "high"]


def test_a_request_that_lost_its_instance_goes_before_its_peers() -> None:
    world = World(instance("d", max_num_seqs=1))
    world.placed(ask("running"))
    world.on(ask("fresh"))
    world.on(ask("again", attempt=1), after_s=1.0)
    (action,) = world.on(Finished("running", 0))
    assert action.message == Placed("again", 1, action.message.route)  # type: ignore[union-attr]


def test_small_requests_pass_a_big_one_but_not_for_ever() -> None:
    world = World(instance("d", num_blocks=100))
    world.placed(ask("s0", 640, 0))
    assert world.on(ask("big", 1440, 0)) == []
    assert world.placed(ask("s1", 640, 0)) == "d"
    world.on(Finished("s0", 0), after_s=PATIENCE_S)
    assert world.log[-1] == "claim big#0 d"
    assert world.on(ask("s2", 640, 0)) == []
    (action, *_) = world.on(Finished("s1", 0))
    assert isinstance(action.message, Placed)
    assert action.message.request_id == "big"
    (action,) = world.on(Finished("big", 0))
    assert isinstance(action.message, Placed)
    assert action.message.request_id == "s2"


def test_a_claim_keeps_one_instance_only_and_ends_with_its_claimant() -> None:
    world = World(instance("d1", num_blocks=100), instance("d2", num_blocks=100))
    for name in ("a", "b"):
        world.placed(ask(name, 640, 0))
    world.on(ask("big", 1600, 0))
    world.on(Tick(), after_s=PATIENCE_S)
    assert world.log[-1] == "claim big#0 d1"
    assert world.placed(ask("c", 320, 0)) == "d2"
    assert world.placed(ask("d", 320, 0)) == "d2"
    assert world.on(ask("e", 640, 0)) == []
    (action,) = world.on(Finished("big", 0))
    assert route_of(action) == "d1"


# --- admission -----------------------------------------------------------------------------------------------------
def test_what_can_never_fit_is_refused_for_good() -> None:
    world = World(instance("d1", num_blocks=10), instance("d2", num_blocks=20))
    rejected = world.rejected(ask("a", 300, 21))
    assert rejected.retry_after_s == 0
    assert "321 tokens" in rejected.reason
    assert "320" in rejected.reason
    assert world.placed(ask("b", 300, 20)) == "d2"


def test_a_sequence_must_fit_one_group_of_an_instance() -> None:
    world = World(
        instance("d1", num_blocks=40, num_groups=2), instance("p", "p", num_blocks=60, num_groups=2)
    )
    rejected = world.rejected(ask("a", 300, 21))
    assert "321 tokens (prompt and output) do not fit: the largest instance holds 320" in rejected.reason
    assert world.placed(ask("b", 300, 20)) == "p>d1"
    world.on(instance("d2", num_blocks=60))
    assert world.placed(ask("c", 480, 1)) == "d2", "the prefill instance's groups are too small for it"


def test_without_decode_instances_requests_wait_a_little() -> None:
    world = World(instance("p", "p"))
    assert world.on(ask("a")) == []
    assert world.on(Tick()) == []
    assert world.on(Tick(), after_s=NO_DECODE_WAIT_S - 0.1) == []
    rejected = world.rejected(Tick(), after_s=0.2)
    assert rejected.reason == "no decode instance is alive"
    assert rejected.retry_after_s >= 1
    assert world.scheduler.num_queued == 0


def test_a_decode_instance_that_comes_in_time_serves_who_waits() -> None:
    world = World()
    world.on(ask("a"))
    world.on(Tick())
    (action,) = world.on(instance("d"), after_s=3.0)
    assert route_of(action) == "d"


def test_a_full_queue_refuses_the_last_in_order() -> None:
    world = World(instance("d", max_num_seqs=1), max_queued_requests=2)
    world.placed(ask("running"))
    world.on(ask("n1"))
    world.on(ask("n2"))
    assert world.rejected(ask("n3")).request_id == "n3"
    assert world.rejected(ask("high", priority=1)).request_id == "n2"
    assert world.rejected(ask("again", attempt=1)).request_id == "n1"
    assert world.rejected(ask("again2", attempt=2)).request_id == "high"
    assert world.on(ask("again3", attempt=3)) == []


def test_waiting_too_long_ends_in_a_429() -> None:
    world = World(instance("d", max_num_seqs=1), max_queue_wait_s=10)
    world.placed(ask("running"))
    world.on(ask("late"))
    assert world.on(Tick(), after_s=10.0) == []
    rejected = world.rejected(Tick(), after_s=0.1)
    assert "10 s" in rejected.reason
    assert rejected.retry_after_s >= 1


def test_a_wait_that_can_be_foreseen_is_refused_at_once_with_an_honest_time() -> None:
    world = World(instance("d", max_num_seqs=1), max_queue_wait_s=20)
    world.placed(ask("r0"))
    for i in range(1, 40):
        world.on(ask(f"r{i}", ttft_s=60.0))
    for i in range(10):  # one leaves per second
        world.on(Finished(f"r{i}", 0), after_s=1.0)
    assert world.scheduler.num_queued == 29
    rejected = world.rejected(ask("no", ttft_s=60.0))
    assert "about 29 s" in rejected.reason
    assert rejected.retry_after_s == 20  # 30 wait, 1 leaves per second, and 10 is half of the longest queue
    assert world.on(ask("urgent", priority=9)) == []
    assert world.on(ask("again", attempt=1)) == []


def test_a_quiet_time_says_nothing_about_capacity() -> None:
    world = World(instance("d", max_num_seqs=1), max_queue_wait_s=5)
    for i in range(5):
        world.placed(ask(f"slow{i}"))
        world.on(Finished(f"slow{i}", 0), after_s=8.0)
    world.placed(ask("running"))
    assert all(world.on(ask(f"r{i}")) == [] for i in range(20))


# --- failures ------------------------------------------------------------------------------------------------------
def test_excluded_instances_are_avoided_while_there_are_others() -> None:
    world = World(instance("d1"), instance("d2"), instance("p1", "p"), instance("p2", "p"))
    gone = ("d1", "p1")
    assert {world.placed(ask(f"a{i}", exclude=gone)) for i in range(3)} == {"p2>d2", "d2"}
    world.on(PeerLost("d2"))
    assert world.placed(ask("b", exclude=gone)) in ("p2>d1", "d1")


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


def test_a_lost_instance_gets_nothing_and_its_promises_are_gone() -> None:
    world = World(instance("d1"), instance("d2"))
    routes = {name: world.placed(ask(name)) for name in "ab"}
    world.on(PeerLost("d1"))
    assert world.scheduler.num_placed == 1
    assert world.placed(ask("c")) == "d2"
    for name in routes:
        world.on(Finished(name, 0))
    world.on(Finished("c", 0))
    assert [m.num_promises for m in world.scheduler.members] == [0]


def test_a_restarted_instance_starts_with_a_clean_slate() -> None:
    world = World(instance("d", num_blocks=40), instance("p", "p"))
    request = ask("a", 400, prefix=1)
    world.on(report("d", free_blocks=40, cache_added=request.place.block_hashes))
    world.placed(request)
    world.on(instance("d", num_blocks=40, incarnation="2"))
    assert [m.num_promises for m in world.scheduler.members if m.address == "d"] == [0]
    assert world.placed(ask("b", 400, prefix=1)) == "p>d"


def test_registering_again_changes_nothing() -> None:
    world = World(instance("d"))
    world.placed(ask("a"))
    world.on(instance("d"))
    assert [m.num_promises for m in world.scheduler.members] == [1]


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


# --- a new prefill instance ----------------------------------------------------------------------------------------
def need(lost: str, attempt: int = 0, num_tokens: int = 400) -> PrefillNeeded:
    return PrefillNeeded("d", NeedPrefill("a", attempt, 1, num_tokens, lost))


@pytest.mark.parametrize("alive", [True, False])
def test_a_reservation_gets_another_prefill_instance(alive: bool) -> None:
    world = World(instance("d"), instance("p1", "p"), instance("p2", "p"))
    assert world.placed(ask("a")) == "p1>d"
    if not alive:
        world.on(PeerLost("p1"))
    assert world.on(need("p1")) == [Send("d", PrefillAssigned("a", 0, 1, "p2"))]
    assert {m.address: m.num_promises for m in world.scheduler.members if m.num_promises} == {"d": 1, "p2": 1}
    world.on(Finished("a", 0))
    assert not any(m.num_promises for m in world.scheduler.members)


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


# --- what is learned -----------------------------------------------------------------------------------------------
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
