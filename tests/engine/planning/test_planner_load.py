"""What an instance reports of itself: of all groups of ranks together."""

from dataclasses import asdict, fields, replace

from engine.planning.planner_load import PlannerLoad, total_load

ONE = PlannerLoad(
    num_used_blocks=1,
    num_available_blocks=2,
    num_running=3,
    num_decoding=4,
    num_waiting=5,
    num_context_tokens=6,
    num_late_tokens=7,
    pausable_blocks=8,
    waiting_by_priority=((0, 5), (2, 7)),
    num_preempted=9,
    num_returned=10,
    prefix_tokens=(11, 12),
    draft_tokens=(13, 14),
)


def test_groups_together_have_the_sum_of_each_number_and_of_what_waits_of_each_class() -> None:
    other = replace(ONE, waiting_by_priority=((-1, 0), (2, 1)), prefix_tokens=(100, 1))
    both = total_load([ONE, other])
    assert both.waiting_by_priority == ((-1, 0), (0, 5), (2, 8))
    assert both.num_waiting_tokens == ONE.num_waiting_tokens + other.num_waiting_tokens == 13
    assert (both.prefix_tokens, both.draft_tokens) == ((111, 13), (26, 28))
    numbers = [one.name for one in fields(PlannerLoad) if isinstance(getattr(ONE, one.name), int)]
    assert [getattr(both, name) for name in numbers] == [2 * getattr(ONE, name) for name in numbers]
    assert asdict(total_load([ONE])) == asdict(ONE)


def test_what_only_counts_up_is_no_new_load_to_report() -> None:
    assert (
        replace(ONE, num_preempted=90, num_returned=90, prefix_tokens=(90, 90), draft_tokens=(90, 90)) == ONE
    )
    assert replace(ONE, num_waiting=90) != ONE
