"""Requests whose class names no targets: served in the order of arrival, refused for load alone."""

from dataclasses import replace
from math import inf

from hypothesis import given
from hypothesis import strategies as st

from cluster.scheduler.scheduler_events import RequestArrived, Tick
from core.cost.steps import StepModel, StepModels
from core.messages import Finished, PlaceReply, Rejected
from core.types import Slo
from tests.cluster.scheduler.routing_world import World, ask, instance, report

SLOW = StepModels(
    decode=StepModel(fixed_s=1.0, seq_s=0.1, num_steps=100, error=0.01),
    prompt=StepModel(fixed_s=1.0, token_s=0.1, num_steps=100, error=0.01),
)
"""Ten tokens of a prompt a second: too slow for every class that names targets."""


def plain(name: str, num_tokens: int = 100) -> RequestArrived:
    event = ask(name, num_tokens)
    return replace(event, place=replace(event.place, slo=Slo()))


def one_slot() -> World:
    world = World(instance("d", "pd", max_num_seqs=1))
    world.on(report("d", steps=SLOW))
    return world


def test_a_class_names_no_targets_unless_it_is_told_any() -> None:
    assert (Slo().ttft_s, Slo().tpot_s, Slo().hopeless) == (inf, inf, "run")


@given(st.lists(st.integers(1, 300), min_size=2, max_size=6))
def test_they_are_placed_in_the_order_in_which_they_came(lengths: list[int]) -> None:
    world = one_slot()
    world.placed(plain("running"))
    names = [f"r{i}" for i in range(len(lengths))]
    for name, length in zip(names, lengths, strict=True):
        assert world.on(plain(name, length)) == []
    placed: list[str] = []
    running = "running"
    for _ in names:
        actions = world.on(Finished(running, 0, 5, complete=True))
        actions += world.on(report("d", steps=SLOW, received=(f"{running}#0",)))
        (running,) = [
            action.message.request_id for action in actions if isinstance(action.message, PlaceReply)
        ]
        placed.append(running)
    assert placed == names


def test_none_is_refused_however_slow_the_machine_is() -> None:
    world = one_slot()
    world.placed(plain("running", 3000))
    assert world.on(plain("long", 3000)) == []


def test_they_wait_no_longer_than_others() -> None:
    world = one_slot()
    world.placed(plain("running"))
    assert world.on(plain("waits")) == []
    world.now += 61
    (refused,) = world.on(Tick())
    assert isinstance(refused.message, Rejected)
    assert refused.message.retry_after_s > 0


def test_one_goes_where_it_ends_soonest() -> None:
    """Without targets nothing else keeps a batch from growing while another instance has nothing to do."""
    world = World(instance("full", "pd"), instance("idle", "pd"))
    world.on(report("full", steps=SLOW, num_running=6, num_decoding=6, context_tokens=600))
    world.on(report("idle", steps=SLOW, num_running=1, num_decoding=1, context_tokens=100))
    assert world.placed(plain("a")) == "idle"


def test_what_is_late_leaves_nothing_to_requests_that_cannot_be() -> None:
    world = World(instance("d", "pd", max_num_seqs=4))
    world.on(report("d"))
    for name in ("a", "b"):
        world.placed(plain(name))
    late = ask("late", 100, ttft_s=1e-4)
    assert world.placed(late) == "d"


def test_an_instance_has_prompts_for_a_whole_step_more() -> None:
    """Its steps take a second: a prompt that came when the one before it was done would leave a part of each step empty."""
    steps = replace(SLOW, prompt=replace(SLOW.prompt, token_s=0.002))
    world = World(instance("d", "pd"))
    world.on(report("d", steps=steps, step_s=1.0, num_running=1, num_decoding=1, context_tokens=100))
    world.placed(plain("a", 500))
    assert world.on(ask("timed", 500, ttft_s=100.0)) == []
    assert world.placed(plain("b", 500)) == "d"
