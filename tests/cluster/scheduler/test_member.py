"""What the scheduler counts on at one instance, against the plainest count of it."""

from collections import Counter
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from cluster.scheduler.fleet.context_forecast import NO_CONTEXTS
from cluster.scheduler.fleet.member import Member
from cluster.scheduler.fleet.reservation import PlacementReservation
from core.kv import num_blocks_for
from tests.cluster.scheduler.routing_world import instance, report

paths = st.lists(st.integers(0, 2), min_size=1, max_size=6)
"""Prompts of three kinds of block, so that they share beginnings."""


def chained(path: list[int]) -> tuple[int, ...]:
    """A hash for each block that says all before it."""
    return tuple(hash(tuple(path[: end + 1])) for end in range(len(path)))


@given(st.lists(st.tuples(paths, st.booleans()), max_size=12), paths, st.integers(0, 6))
def test_blocks_that_reservations_pay_for_are_counted_once(
    steps: list[tuple[list[int], bool]], asked: list[int], num_cached: int
) -> None:
    member, held, living = Member(instance("d")), Counter[int](), list[tuple[str, tuple[int, ...]]]()
    for number, (path, ends_first) in enumerate(steps):
        if ends_first and living:
            key, hashes = living.pop(0)
            member.release(key)
            held.subtract(hashes)
        living.append((f"r{number}", chained(path)))
        member.reserve(f"r{number}", PlacementReservation(0.0, 1, 1, 16, hashes=living[-1][1]))
        held.update(living[-1][1])
    num_cached, hashes, shared = min(num_cached, len(asked)), chained(asked), 0
    while shared < num_cached and held[hashes[shared]] > 0:
        shared += 1
    num_tokens = len(asked) * member.block_size + 1
    assert member.blocks_needed(num_tokens, hashes, num_cached) == num_blocks_for(num_tokens, 16) - shared
    for key, _ in living:
        member.release(key)
    assert member.blocks_needed(num_tokens, hashes, num_cached) == num_blocks_for(num_tokens, 16)
    assert member.free_blocks == member.num_blocks


def test_a_recurrent_state_takes_its_blocks_from_each_sequence() -> None:
    member = Member(replace(instance("d"), num_blocks=100, state_blocks=30))
    assert member.capacity_tokens == 70 * 16
    assert member.blocks_needed(17, (), 0) == 32
    assert member.has_blocks(70 * 16, NO_CONTEXTS, (), {})
    assert not member.has_blocks(70 * 16 + 1, NO_CONTEXTS, (), {})
    member.reserve("r", PlacementReservation(0.0, 1, member.blocks_needed(17, (), 0), 17, hashes=()))
    assert not member.has_blocks(39 * 16, NO_CONTEXTS, (), {}), "38 blocks are left beside its state"
    assert member.has_blocks(38 * 16, NO_CONTEXTS, (), {})


def test_what_a_report_showed_ends_with_the_last_request_that_it_showed() -> None:
    member = Member(instance("d"))
    for key in ("one", "two", "later"):
        member.reserve(key, PlacementReservation(0.0, 1, 1, 5, hashes=()))
    shown = report("d", waiting_tokens=800, num_waiting=1, num_running=1, received=("one", "two"))
    member.report(shown, settled_before=0.0)
    member.release("one")
    assert member.queued_tokens == 805, "whose tokens these are is not known"
    member.release("two")
    assert member.queued_tokens == 5
    assert member.num_seqs == 1
    member.release("later")
    assert not member.is_busy
