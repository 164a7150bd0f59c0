"""Prompts whose first token no instance could give in time: refused by name while others have to wait, as their class says."""

from dataclasses import replace
from math import inf
from typing import Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.scheduler.fleet.member import Member
from cluster.scheduler.placement.load_forecast import late_if_idle
from cluster.scheduler.placement.placement_policy import PlacementQuery
from cluster.scheduler.scheduler_events import RequestArrived, Tick
from core.cost.steps import StepModel, StepModels, chunk_pairs
from core.messages import Finished, PlaceReply, Rejected
from core.scheduler_tuning import DEFAULT_TUNING as TUNING
from core.types import Slo
from tests.cluster.scheduler.routing_world import World, ask, instance, report

STEPS = StepModels(
    decode=StepModel(fixed_s=0.01, num_steps=100, error=0.01),
    prompt=StepModel(fixed_s=0.01, token_s=1e-3, num_steps=100, error=0.01),
)
"""A thousand tokens of a prompt a second."""
CHAT = Slo(name="chat", ttft_s=2.0, tpot_s=0.1, hopeless="refuse")


def chat(
    name: str, num_tokens: int, *, hopeless: Literal["refuse", "run"] = "refuse", prefix: int = 0
) -> RequestArrived:
    event = ask(name, num_tokens, prefix=prefix)
    slo = replace(CHAT, hopeless=hopeless)
    return replace(event, place=replace(event.place, slo=slo))


def told(world: World, name: str, **changes: object) -> None:
    world.on(report(name, **{"steps": STEPS, **changes}))


def busy(**changes: object) -> World:
    """One instance, with one sequence, for which a request waits that can still be in time."""
    world = World(instance("d", "pd", max_num_seqs=1))
    told(world, "d", **changes)
    world.placed(chat("running", 100))
    assert world.on(chat("waits", 100)) == []
    return world


def test_a_hopeless_prompt_is_refused_while_others_have_to_wait_and_told_what_would_be_possible() -> None:
    rejected = busy().rejected(chat("long", 3000))
    assert rejected.retry_after_s == 0, "waiting would not help"
    assert rejected.possible_ttft_s == pytest.approx(3.06, rel=0.01)
    assert "about 3.1 s on an idle instance" in rejected.reason
    assert "the class 'chat' wants it in 2 s" in rejected.reason


def lower(event: RequestArrived) -> RequestArrived:
    """Make it one of a class two priorities below."""
    return replace(event, place=replace(event.place, slo=replace(event.place.slo, priority=-2)))


def served_by(world: World, event: RequestArrived) -> Slo | None:
    (action,) = world.on(event)
    assert isinstance(action.message, PlaceReply), action
    return action.message.slo


def test_it_runs_where_nobody_has_to_wait_and_gives_way_there() -> None:
    world = World(instance("d", "pd"))
    told(world, "d")
    assert served_by(world, chat("long", 3000)) == CHAT.giving_way()
    assert served_by(world, chat("short", 300)) == CHAT


def test_another_of_its_class_takes_its_slot_and_a_lower_class_does_not() -> None:
    world = World(instance("d", "pd", max_num_seqs=1))
    told(world, "d")
    world.placed(chat("long", 3000))
    assert world.on(lower(chat("lower", 300))) == []
    assert world.placed(chat("short", 300)) == "d"


def test_it_waits_behind_others_of_its_class_and_before_a_lower_one() -> None:
    world = World(instance("d", "pd", max_num_seqs=1))
    told(world, "d")
    world.placed(chat("running", 100))
    for event in (lower(chat("lower", 100)), chat("long", 3000, hopeless="run"), chat("short", 100)):
        assert world.on(event) == []
    placed = list[str]()
    for name in ("running", "short", "long"):
        (action,) = world.on(Finished(name, 0))
        assert isinstance(action.message, PlaceReply)
        placed.append(action.message.request_id)
    assert placed == ["short", "long", "lower"]


@pytest.mark.parametrize("changes", [{"attempt": 1}, {"source": "d", "prefer": "d"}])
@pytest.mark.parametrize("num_tokens", [300, 3000])
def test_what_goes_on_or_moves_keeps_the_class_by_which_it_was_served(
    num_tokens: int, changes: dict[str, Any]
) -> None:
    place = chat("one", num_tokens).place
    for slo in (place.slo, place.slo.giving_way()):
        world = World(instance("d", "pd"))
        told(world, "d")
        assert served_by(world, RequestArrived("f", replace(place, slo=slo, **changes))) == slo


def test_who_asks_again_is_told_the_same() -> None:
    world = World(instance("d", "pd"))
    told(world, "d")
    assert world.on(chat("long", 3000)) == world.on(chat("long", 3000))


def test_it_runs_where_its_class_says_so() -> None:
    assert busy().on(chat("long", 3000, hopeless="run")) == []


def test_what_is_hopeless_and_waits_does_not_make_others_hopeless() -> None:
    world = World(instance("d", "pd", max_num_seqs=1))
    told(world, "d")
    world.placed(chat("running", 100))
    assert world.on(chat("long", 3000)) == []
    assert world.on(chat("longer", 3000)) == []


def test_nothing_is_refused_once_nobody_has_waited_for_a_while() -> None:
    world = busy()
    world.on(Finished("waits", 0))
    assert isinstance(world.on(chat("long", 3000))[0].message, Rejected)
    world.on(Tick(), after_s=5.1)
    assert world.on(chat("long again", 3000)) == []


@pytest.mark.parametrize(("error", "refused"), [(0.16, True), (0.18, False), (0.6, False)])
def test_an_estimate_counts_less_twice_its_error(error: float, refused: bool) -> None:
    world = busy(steps=replace(STEPS, prompt=replace(STEPS.prompt, error=error)))
    assert bool(world.on(chat("long", 3000))) is refused


def test_nothing_is_hopeless_before_steps_are_known() -> None:
    assert busy(steps=StepModels()).on(chat("long", 3000)) == []
    world = busy()
    world.on(instance("new", "pd", max_num_seqs=0))
    assert world.on(chat("long", 3000)) == []


def test_the_quickest_instance_and_what_it_has_cached_decide() -> None:
    world = busy(cache_added=ask("x", 3000, prefix=7).place.block_hashes)
    assert isinstance(world.on(chat("other", 3000))[0].message, Rejected)
    assert world.on(chat("cached", 3000, prefix=7)) == []
    quick = replace(STEPS, prompt=replace(STEPS.prompt, token_s=1e-4))
    world = busy()
    world.on(instance("quick", "pd", max_num_seqs=0))
    told(world, "quick", steps=quick)
    assert world.on(chat("long", 3000)) == []


def test_what_was_admitted_before_is_never_hopeless() -> None:
    world = busy()
    event = chat("long", 3000)
    assert world.on(replace(event, place=replace(event.place, attempt=1))) == []
    moved = replace(event.place, request_id="long~", source="d", prefer="e")
    assert world.on(replace(event, place=moved)) == []


_seconds = st.floats(0, 0.05)


@given(
    st.builds(
        StepModel,
        fixed_s=_seconds,
        token_s=st.floats(0, 1e-3),
        context_s=st.floats(0, 1e-6),
        seq_s=_seconds,
        pair_s=st.floats(0, 1e-7),
        num_steps=st.just(100),
    ),
    st.integers(1, 100_000),
    st.integers(0, 6000),
    st.integers(16, 8192),
)
def test_an_estimate_is_never_more_than_the_steps_that_an_idle_instance_takes(
    prompt: StepModel, num_missing: int, num_cached_blocks: int, batch_tokens: int
) -> None:
    member = Member(instance("d", "pd", max_batch_tokens=batch_tokens))
    member.report(report("d", steps=StepModels(prompt=prompt)), -inf)
    at = num_cached_blocks * member.block_size
    end, took_s = at + num_missing, 0.0
    while at < end:
        count = min(batch_tokens, end - at)
        took_s += prompt.step_s(count, at + count, 1, chunk_pairs(at, count))
        at += count
    ask = PlacementQuery(end, {"d": num_cached_blocks}, slo=Slo(ttft_s=-1.0))
    estimate = late_if_idle(ask, [member], TUNING.num_errors)
    assert estimate is not None
    assert 0.5 * took_s - 1e-9 <= estimate.least_s <= took_s * (1 + 1e-9)
    in_time = PlacementQuery(end, {"d": num_cached_blocks}, slo=Slo(ttft_s=estimate.least_s))
    assert late_if_idle(in_time, [member], TUNING.num_errors) is None
