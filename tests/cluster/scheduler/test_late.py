"""Prompts that are late cost those that can still be in time nothing: an instance is not full because of them."""

from hypothesis import given
from hypothesis import strategies as st

from cluster.scheduler.fleet.member import Member
from cluster.scheduler.fleet.reservation import PlacementReservation
from core.messages import Finished, PlaceReply
from tests.cluster.scheduler.routing_world import instance, report
from tests.cluster.scheduler.test_slo_policy import fleet, told, wants

LONG = 40_000
"""Tokens that take longer than a second."""


def test_an_instance_full_of_late_prompts_has_room_for_one_in_time() -> None:
    world = fleet(1)
    told(world, "a", waiting_tokens=LONG, late_tokens=LONG)
    assert world.placed(wants("timely", 1000)) == "a"


def test_an_instance_full_of_prompts_in_time_has_none() -> None:
    world = fleet(1)
    told(world, "a", waiting_tokens=LONG, late_tokens=1000)
    assert world.on(wants("timely", 1000)) == []


def test_a_late_prompt_waits_for_what_is_left_over() -> None:
    world = fleet(1)
    told(world, "a", waiting_tokens=LONG, late_tokens=LONG)
    assert world.on(wants("late", LONG, ttft_s=0.1)) == []
    told(world, "a", waiting_tokens=0)
    assert world.scheduler.num_queued == 0


def test_a_late_prompt_that_no_report_shows_yet_gives_way_too() -> None:
    world = fleet(1)
    assert world.placed(wants("late", LONG, ttft_s=0.1)) == "a"
    assert world.placed(wants("timely", 1000)) == "a"


def test_what_is_late_counts_again_once_it_lets_nobody_pass() -> None:
    world = fleet(1)
    told(world, "a", waiting_tokens=LONG, late_tokens=LONG)
    assert world.on(wants("late", 3000, ttft_s=0.05)) == []
    actions = world.on(Finished("nobody", 0), after_s=11.0)
    assert [type(action.message) for action in actions] == [PlaceReply]


@given(
    st.lists(st.tuples(st.integers(0, 9000), st.booleans(), st.booleans()), max_size=12),
    st.integers(0, 50_000),
    st.integers(0, 50_000),
)
def test_a_timely_prompt_never_waits_for_more_than_a_late_one_and_the_rest_is_late(
    reservations: list[tuple[int, bool, bool]], waiting: int, late: int
) -> None:
    member = Member(instance("a", "pd"))
    member.report(report("a", waiting_tokens=waiting, late_tokens=min(waiting, late)), 0.0)
    passed = min(waiting, late)
    for number, (tokens, is_late, released) in enumerate(reservations):
        member.reserve(str(number), PlacementReservation(1.0, 1, 0, tokens, hashes=(), late=is_late))
        if released:
            member.release(str(number))
        elif is_late:
            passed += tokens
    assert member.tokens_before(late=True) == member.queued_tokens
    assert member.tokens_before(late=False) == member.queued_tokens - passed
