"""The global scheduler's decisions: which instances get a request."""

from collections import Counter
from dataclasses import replace

from tests.cluster.scheduler.routing_world import World, ask, instance, report, route_of


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


def test_what_ends_with_its_prompt_is_answered_where_that_is_computed() -> None:
    world = World(instance("d"), instance("p", "p", answers=True))
    assert world.placed(ask("embed", 400, 1)) == "p"
    world.on(report("p", waiting_tokens=6000))
    assert world.placed(ask("another", 400, 1)) == "d", "which is idle, and prefill is far behind"
    world.on(report("p"))
    world.on(report("d", num_running=10))
    assert world.placed(ask("tiny", 8, 1)) == "p"
    assert world.placed(ask("goes on", 400, 2)) == "p>d"


def test_it_goes_to_decode_where_nobody_else_answers_or_the_prompt_is_cached() -> None:
    world = World(instance("d"), instance("p", "p"))
    assert world.placed(ask("an older release's prefill instance", 400, 1)) == "d"
    world = World(instance("d"))
    assert world.placed(ask("a", 400, 1)) == "d"
    world = World(instance("d"), instance("p", "p", answers=True))
    tail = ask("x", 1600, 1, prefix=1)
    world.on(report("d", cache_added=tail.place.block_hashes))
    assert world.placed(tail) == "d"


def test_a_copy_for_a_move_is_handed_over_though_it_draws_one_token() -> None:
    world = World(instance("d1"), instance("d2"), instance("p", "p", answers=True))
    arrived = ask("copy", 400, 1, exclude=("d1",))
    assert world.placed(replace(arrived, place=replace(arrived.place, source="d1"))) == "d1>d2"


def test_prompts_that_end_with_themselves_wait_for_prompt_room_and_not_for_decode() -> None:
    world = World(instance("d", max_num_seqs=1), instance("p", "p", answers=True))
    world.on(report("d", num_running=1))
    assert world.on(ask("goes on", 400, 64)) == []
    sent = [world.on(ask(f"r{i}", 32, 1)) for i in range(200)]
    placed = [route_of(action) for actions in sent for action in actions]
    assert placed == ["p"] * 129, "a second of work, and what is computed until word of more gets there"
    assert len(world.on(report("p", received=tuple(f"r{i}#0" for i in range(200))))) == 71
    assert world.scheduler.num_queued == 1
