"""Prompts that are computed before a slot is free for their sequences: which, how many, and for which reserved slot."""

from dataclasses import replace

import pytest

from cluster.scheduler.scheduler_events import RequestArrived, Tick
from core.messages import Finished, PlaceReply
from tests.cluster.scheduler.routing_world import World, instance, route_of
from tests.cluster.scheduler.test_slo_policy import STEPS, told, wants

SLOTS, OUTPUT_TOKENS = 8, 300
PARTS = {"num_blocks": 20_000, "max_batch_tokens": 8192, "max_num_seqs": SLOTS}


def full(role: str = "d", *, knows_outputs: bool = True) -> World:
    """One instance whose slots are all taken, beside a prefill instance."""
    world = World(instance("d", role, **PARTS), *([instance("p", "p", **PARTS)] if role == "d" else []))
    for member in world.scheduler.members:
        told(world, member.address)
    for number in range(25 if knows_outputs else 0):
        world.on(with_output(wants(f"past{number}", 100)))
        world.on(Finished(f"past{number}", 0, OUTPUT_TOKENS, complete=True))
    for number in range(SLOTS):
        assert world.on(with_output(wants(f"running{number}", 100)))
    settle(world, *(f"running{number}#0" for number in range(SLOTS)))
    return world


def settle(world: World, *keys: str) -> None:
    """Let the instances have received what was placed, and have computed its prompts."""
    for member in world.scheduler.members:
        told(world, member.address, received=keys)


def with_output(event: RequestArrived, num_tokens: int = 1000) -> RequestArrived:
    return replace(event, place=replace(event.place, max_new_tokens=num_tokens))


def hurried(
    name: str, *, tpot_s: float = 0.05, num_output: int = 1000, num_tokens: int = 500
) -> RequestArrived:
    return with_output(wants(name, num_tokens, ttft_s=0.45, tpot_s=tpot_s), num_output)


def test_a_prompt_that_is_due_soon_is_computed_before_a_slot_is_free() -> None:
    assert full().placed(hurried("r")) == "p>d"


def test_one_with_more_time_waits_until_it_is_due_soon() -> None:
    world = full()
    assert world.on(with_output(wants("r", 500, ttft_s=2.0))) == []
    assert world.on(Tick(), after_s=0.9) == []
    (action,) = world.on(Tick(), after_s=0.2)
    assert route_of(action) == "p>d"


def test_one_with_more_time_takes_a_slot_as_soon_as_one_is_free() -> None:
    world = full()
    assert world.on(with_output(wants("r", 500, ttft_s=2.0))) == []
    (action,) = world.on(Finished("running0", 0))
    assert route_of(action) == "p>d"


@pytest.mark.parametrize("tpot_s", [0.012, 0.02, 0.05])
def test_as_many_are_begun_early_as_keep_their_time_per_token(tpot_s: float) -> None:
    """One of eight slots comes free in each eighth of an output's steps, and a wait is spread over the output's tokens.
    That many are known to a fifth (`OutputLengths`)."""
    world = full()
    num_early = 0
    while world.on(hurried(f"r{num_early}", tpot_s=tpot_s)):
        settle(world, f"r{num_early}#0")
        num_early += 1
        assert num_early < 500
    step_s = STEPS.decode.step_s(SLOTS, SLOTS * 400, SLOTS)

    def per_token_s(number: int) -> float:
        return step_s * (1 + number / SLOTS)

    assert step_s * (1 + num_early / SLOTS / 1.2) <= tpot_s
    assert per_token_s(num_early + 4) > 0.85 * tpot_s
    assert world.scheduler.num_queued == 1


def test_a_short_prompt_leaves_its_decode_instance_only_where_that_has_no_slot() -> None:
    world = full()
    assert world.placed(hurried("early", num_tokens=20)) == "p>d"
    for number in range(2):
        world.on(Finished(f"running{number}", 0, OUTPUT_TOKENS, complete=True))
    assert world.placed(hurried("in a slot", num_tokens=20)) == "d"


def test_nothing_is_begun_early_while_nobody_knows_how_long_outputs_are() -> None:
    assert full(knows_outputs=False).on(hurried("r")) == []


def test_nor_where_the_prompt_itself_needs_a_slot() -> None:
    assert full("pd").on(hurried("r")) == []


def test_what_is_late_waits_until_half_of_the_slots_are_free() -> None:
    world = full()
    late = with_output(wants("r", 500, ttft_s=0.001))
    assert world.on(late) == []
    for number in range(SLOTS // 2):
        assert world.on(Finished(f"running{number}", 0)) == []
    assert len(world.on(Finished(f"running{SLOTS // 2}", 0))) == 1


def of(tenant: str, event: RequestArrived) -> RequestArrived:
    return replace(event, place=replace(event.place, tenant=tenant))


def test_a_tenant_whose_answers_are_long_does_not_keep_the_slots_from_another() -> None:
    """A short answer has no time to wait for a slot. While another tenant's waits in front, nothing joins the line for one."""
    world = full()
    for number in range(5):
        assert world.on(hurried(f"long{number}"))
    settle(world, *(f"long{number}#0" for number in range(5)))
    assert world.on(of("other", hurried("short", num_output=4))) == []
    assert world.on(hurried("another long one")) == []
    placed: list[str] = []
    for number in range(6):
        for action in world.on(Finished(f"running{number}", 0, OUTPUT_TOKENS, complete=True)):
            assert isinstance(action.message, PlaceReply)
            placed.append(action.message.request_id)
    assert placed[0] == "short"


def test_of_one_tenant_as_many_are_served_in_time_as_can_be() -> None:
    world = full()
    for number in range(5):
        assert world.on(hurried(f"long{number}"))
    settle(world, *(f"long{number}#0" for number in range(5)))
    assert world.on(hurried("short", num_output=4)) == []
    assert world.placed(hurried("another long one")) == "p>d"


def test_a_free_slot_elsewhere_is_taken_before_one_that_is_reserved() -> None:
    world = full()
    world.on(instance("e", "d", **PARTS))
    told(world, "e")
    assert world.placed(hurried("r")).endswith("e")


def test_blocks_are_left_for_the_sequences_that_run_to_grow_into() -> None:
    """An instance gives its last block for each of them to no newcomer, so that one would wait there."""
    world = World(instance("d", num_blocks=100, max_num_seqs=64))
    told(world, "d", free_blocks=50, num_running=30)
    assert world.on(with_output(wants("large", 21 * 16), 0)) == []
    assert world.placed(with_output(wants("small", 19 * 16), 0)) == "d"
