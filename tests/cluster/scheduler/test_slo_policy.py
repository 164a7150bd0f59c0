"""Placing by targets, in a fleet whose instances do both roles and know their step times."""

from collections import Counter
from dataclasses import replace

import pytest

from cluster.scheduler.fleet.member import Member
from cluster.scheduler.scheduler_events import RequestArrived
from core.cost.steps import StepModel, StepModels
from core.messages import Finished
from core.types import Slo
from tests.cluster.scheduler.routing_world import World, ask, instance, report, route_of

STEPS = StepModels(
    decode=StepModel(fixed_s=0.008, token_s=0.0, context_s=50e-9, seq_s=20e-6, error=0.01, num_steps=500),
    prompt=StepModel(fixed_s=0.009, token_s=27e-6, context_s=50e-9, seq_s=0.0, error=0.02, num_steps=500),
)
NAMES = ("a", "b", "c", "d")


def fleet(num: int = 4, **changes: object) -> World:
    """H100-like instances with an 8B model, all idle."""
    values = {"num_blocks": 20_000, "max_batch_tokens": 8192, "max_num_seqs": 256, **changes}
    world = World(*(instance(name, "pd", sends=True, **values) for name in NAMES[:num]))
    for name in NAMES[:num]:
        told(world, name)
    return world


def pools() -> World:
    """Two of them: `a` does both, `b` computes prompts only."""
    values = {"num_blocks": 20_000, "max_batch_tokens": 8192, "max_num_seqs": 256, "sends": True}
    world = World(instance("a", "pd", **values), instance("b", "p", **values))
    for name in NAMES[:2]:
        told(world, name)
    return world


def told(world: World, name: str, **changes: object) -> None:
    values = {"free_blocks": 20_000, "tokens_per_s": 35_000.0, "step_s": 0.01, "steps": STEPS, **changes}
    world.on(report(name, **values))


def wants(
    name: str, num_tokens: int, *, ttft_s: float = 2.0, tpot_s: float = 0.05, prefix: int = 0
) -> RequestArrived:
    event = ask(name, num_tokens, 256, prefix=prefix)
    return replace(event, place=replace(event.place, slo=Slo(name="x", ttft_s=ttft_s, tpot_s=tpot_s)))


def without(name: str, event: RequestArrived) -> RequestArrived:
    """Keep the request from that instance."""
    return replace(event, place=replace(event.place, exclude=(name,)))


def decode_of(route: str) -> str:
    return route.split(">")[-1]


def test_an_idle_fleet_computes_a_prompt_where_it_decodes() -> None:
    assert fleet().placed(wants("r", 4000)) in NAMES


@pytest.mark.parametrize(("free_blocks", "route"), [(255, "b>a"), (240, "a")])
def test_a_prompt_is_computed_for_another_where_there_are_blocks_for_it(free_blocks: int, route: str) -> None:
    """250, and more for an output. An instance that is full of outputs would let it wait."""
    world = fleet(2)
    told(world, "a", num_running=200, num_decoding=200, context_tokens=200_000)
    told(world, "b", free_blocks=free_blocks)
    assert world.placed(wants("r", 4000, ttft_s=0.2, tpot_s=0.03)) == route


def test_sequences_spread_over_instances_also_where_none_decodes_yet() -> None:
    world = fleet()
    decodes = Counter[str]()
    for i in range(40):
        decodes[decode_of(world.placed(wants(f"r{i}", 40)))] += 1
    assert decodes == dict.fromkeys(NAMES, 10)


def test_a_new_instance_is_taken_to_decode_as_those_that_know_how_long_it_takes() -> None:
    """Otherwise it would decode for nothing, and all would go there."""
    world = fleet()
    told(world, "d", steps=StepModels())
    decodes = Counter[str]()
    for i in range(80):
        decodes[decode_of(world.placed(wants(f"r{i}", 40)))] += 1
    assert decodes == dict.fromkeys(NAMES, 20)


@pytest.mark.parametrize("tpot_s", [0.012, 0.05])
def test_no_batch_grows_beyond_its_tightest_target(tpot_s: float) -> None:
    world = fleet()
    for i in range(100):
        world.on(wants(f"r{i}", 1000, tpot_s=tpot_s))
        for name in NAMES:
            told(world, name, received=(f"r{i}#0",))
    members = [m for m in world.scheduler.members if m.batch_seqs]
    assert sum(m.batch_seqs for m in members) > 20
    for member in members:
        step_s = STEPS.decode.step_s(member.batch_seqs, member.batch_context_tokens, member.batch_seqs)
        assert step_s <= tpot_s


def filled(world: World, steps: StepModels, tpot_s: float, short_tokens: int) -> Member:
    """Return the only instance with as many requests of 400 tokens as it is given, once outputs have had `short_tokens`."""
    told(world, "a", steps=steps)
    for i in range(25):
        world.on(wants(f"old{i}", 400))
        world.on(Finished(f"old{i}", 0, short_tokens, complete=True))
    num_placed = 0
    while world.on(wants(f"r{num_placed}", 400, tpot_s=tpot_s)):
        told(world, "a", steps=steps, received=(f"r{num_placed}#0",))
        num_placed += 1
        assert num_placed < 256
    (member,) = world.scheduler.members
    return member


@pytest.mark.parametrize(
    ("error", "short_tokens", "unread_s"),
    [(0.0, 256, 0.0), (0.2, 256, 0.0), (0.2, 4, 0.0), (0.0, 256, 0.006)],
)
def test_a_batch_fills_up_to_its_target_but_for_what_predictions_are_off(
    error: float, short_tokens: int, unread_s: float
) -> None:
    """What single steps are off by evens out over the shortest outputs' steps. Prompts take nothing here. Where experts are routed
    more sequences may read no more of them."""
    decode = replace(STEPS.decode, error=error, unread_s=unread_s, unread_decay=0.01)
    steps, tpot_s = StepModels(decode, replace(STEPS.prompt, token_s=0.0)), 0.014
    member = filled(fleet(1), steps, tpot_s, short_tokens)
    num_seqs, context, most_s = member.batch_seqs, member.batch_context_tokens, 0.99 * tpot_s
    at_most = 1 + 2 * error / short_tokens**0.5
    assert at_most * decode.step_s(num_seqs, context, num_seqs) <= most_s
    assert at_most * decode.step_s(num_seqs + 1, context + 400, num_seqs + 1) > most_s


def test_a_tight_request_does_not_join_a_batch_that_is_too_slow_for_it() -> None:
    world = fleet(2)
    for i in range(40):
        world.on(without("b", wants(f"loose{i}", 2000, ttft_s=600.0, tpot_s=10.0)))
        for name in NAMES[:2]:
            told(world, name, received=(f"loose{i}#0",))
    fullest = max(world.scheduler.members, key=lambda m: m.batch_seqs)
    step_s = STEPS.decode.step_s(fullest.batch_seqs, fullest.batch_context_tokens, fullest.batch_seqs)
    assert step_s > 0.0125
    for action in world.on(wants("tight", 100, tpot_s=0.0125)):
        assert decode_of(route_of(action)) != fullest.address


def test_a_prompt_too_long_for_its_batch_goes_to_an_instance_that_does_not_decode() -> None:
    world = fleet(2)
    for i in range(30):
        world.on(without("b", wants(f"r{i}", 100, tpot_s=0.014)))
    told(world, "a")
    route = world.placed(wants("long", 16_000, ttft_s=1.0, tpot_s=0.014))
    assert route.split(">")[0] == "b"


@pytest.mark.parametrize(("num_output", "route"), [(6, "a"), (300, "b>a")])
def test_a_short_answer_is_not_moved_where_its_second_token_would_wait_for_a_step(
    num_output: int, route: str
) -> None:
    world = pools()
    for i in range(25):
        world.on(wants(f"old{i}", 100))
        world.on(Finished(f"old{i}", 0, num_output, complete=True))
    for i in range(30):
        world.on(wants(f"r{i}", 100))
    told(world, "a", step_s=0.17)
    assert world.placed(wants("long", 16_000, ttft_s=1.0)) == route


@pytest.mark.parametrize(("num_output", "moves"), [(4, False), (300, True)])
def test_a_short_answer_is_not_moved_where_a_long_prompt_has_just_begun(num_output: int, moves: bool) -> None:
    """Nothing decodes there, so nothing bounds that step, and no report shows it yet."""
    world = pools()
    for i in range(25):
        world.on(wants(f"old{i}", 100))
        world.on(Finished(f"old{i}", 0, num_output, complete=True))
    long = wants("long", 6000, ttft_s=0.45, tpot_s=0.04)
    world.on(without("b", long))
    routes = [route_of(action) for action in world.on(wants("short", 400, ttft_s=0.45, tpot_s=0.04))]
    assert ("b>a" in routes) == moves


def test_a_cached_prefix_draws_a_prompt_until_its_holder_is_too_busy() -> None:
    world = fleet()
    shared = wants("x", 16_000, prefix=7)
    told(world, "c", cache_added=shared.place.block_hashes)
    assert world.placed(wants("r0", 16_000, ttft_s=0.45, prefix=7)) == "c"
    told(world, "c", cache_added=shared.place.block_hashes, waiting_tokens=40_000)
    assert "c" not in world.placed(wants("r1", 16_000, ttft_s=1.0, prefix=7))


def source_of(line: str) -> str:
    """What computes the prompt, by the scheduler's log."""
    _, _, prefill, decode = line.split()
    return decode if prefill == "local" else prefill


def test_when_all_share_a_prefix_they_do_not_pile_up_on_its_holder() -> None:
    world = fleet()
    shared = ask("x", 512, prefix=9).place.block_hashes
    told(world, "a", cache_added=shared)
    for i in range(60):
        world.on(wants(f"r{i}", 9_000 + 16 * i, ttft_s=2.0, prefix=9))
        last = source_of(world.log[-1])
        for name in NAMES:
            received = tuple(f"r{j}#0" for j in range(i + 1))
            told(world, name, waiting_tokens=9000 if name == last else 0, received=received)
    sources = Counter(map(source_of, world.log))
    assert len(sources) >= 3
    assert max(sources.values()) <= 40


def test_a_request_waits_rather_than_harm_those_that_run() -> None:
    world = fleet(1)
    num_placed = 0
    while world.on(wants(f"r{num_placed}", 400, tpot_s=0.012)):
        told(world, "a")
        num_placed += 1
        assert num_placed < 256
    assert world.scheduler.num_queued == 1
    assert world.on(Finished("r0", 0, 256, complete=True))


def test_a_target_that_no_instance_can_keep_is_not_waited_for() -> None:
    assert fleet().placed(wants("r", 400, tpot_s=0.001)) in NAMES


def test_a_report_that_names_what_it_has_received_counts_nothing_twice() -> None:
    world = fleet(1)
    world.placed(wants("r", 4000))
    (member,) = world.scheduler.members
    told(world, "a", waiting_tokens=4000, num_waiting=1)
    assert member.queued_tokens == 8000  # the report may or may not show the reservation
    told(world, "a", waiting_tokens=4000, num_waiting=1, received=("r#0",))
    assert member.queued_tokens == 4000


@pytest.mark.parametrize("slow", ["a", "b"])
def test_a_higher_class_goes_where_the_step_that_runs_for_lower_ones_ends_soon(slow: str) -> None:
    world = fleet(2)
    for name, other in (("a", "b"), ("b", "a")):
        low = wants(f"low {name}", 16_000, ttft_s=10.0)
        assert world.placed(replace(low, place=replace(low.place, exclude=(other,)))) == name
    for name in NAMES[:2]:
        told(
            world,
            name,
            step_s=0.3 if name == slow else 0.01,
            num_running=1,
            waiting_tokens=16_000,
            waiting_by_priority=((0, 16_000),),
            received=(f"low {name}#0",),
        )
    high = wants("high", 400)
    urgent = Slo(name="urgent", ttft_s=0.45, tpot_s=0.04, priority=2)
    route = world.placed(replace(high, place=replace(high.place, slo=urgent)))
    assert route != slow
    assert route in NAMES


def test_a_late_request_of_a_higher_class_is_not_handed_over_to_the_instance_that_computes_it() -> None:
    """It is late behind the step that runs, whether the lower class gives way or not."""
    world = fleet(1)
    world.placed(wants("low", 2000, ttft_s=10.0))
    told(world, "a", step_s=0.3, waiting_tokens=2000, waiting_by_priority=((0, 2000),), received=("low#0",))
    high = wants("high", 4000)
    urgent = Slo(name="urgent", ttft_s=0.45, tpot_s=0.05, priority=2)
    assert world.placed(replace(high, place=replace(high.place, slo=urgent))) == "a"
