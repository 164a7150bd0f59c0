"""The way from one placement of experts to another: what must hold after each part of it."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from parallel.balance import Placement, place
from parallel.moves import Move, moved, next_moves


@st.composite
def cases(draw: st.DrawFn) -> tuple[Placement, Placement, int]:
    """(from, to, ranks): of one size, each with every expert."""
    num_ranks, num_experts = draw(st.integers(1, 6)), draw(st.integers(1, 24))
    spares = [n for n in range(num_experts * (num_ranks - 1) + 1) if not (num_experts + n) % num_ranks]
    num_spare = draw(st.sampled_from(spares))
    loads = st.lists(st.integers(0, 1000), min_size=num_experts, max_size=num_experts)
    target = place(draw(loads), num_ranks, num_spare)
    former = place(draw(loads), num_ranks, num_spare)
    if draw(st.booleans()):
        former = tuple(draw(st.permutations(former)))
    return former, target, num_ranks


def busiest(moves: tuple[Move, ...], per_rank: int) -> int:
    """Experts that one rank sends to others or gets from them, at the most."""
    remote = [(m.source // per_rank, m.slot // per_rank) for m in moves]
    remote = [(source, slot) for source, slot in remote if source != slot]
    sent, received = Counter(source for source, _ in remote), Counter(slot for _, slot in remote)
    return max((*sent.values(), *received.values()), default=0)


@given(cases(), st.integers(1, 4))
def test_every_part_is_small_and_leaves_every_expert_somewhere(
    case: tuple[Placement, Placement, int], most: int
) -> None:
    slots, target, num_ranks = case
    num_wrong = sum(a != b for a, b in zip(slots, target, strict=True))
    while slots != target:
        moves = next_moves(slots, target, num_ranks, most)
        assert busiest(moves, len(slots) // num_ranks) <= most
        assert len({move.slot for move in moves}) == len(moves)
        after = moved(slots, moves)
        assert set(after) == set(target)
        assert all(b == c for a, b, c in zip(slots, after, target, strict=True) if a == c), (
            "a right one moved"
        )
        left = sum(a != b for a, b in zip(after, target, strict=True))
        assert left < num_wrong
        slots, num_wrong = after, left
    assert next_moves(slots, target, num_ranks, most) == ()


@given(cases())
def test_without_a_limit_everything_moves_at_once_and_nothing_twice(
    case: tuple[Placement, Placement, int],
) -> None:
    slots, target, num_ranks = case
    moves = next_moves(slots, target, num_ranks, len(slots))
    assert moved(slots, moves) == target
    assert len(moves) == sum(a != b for a, b in zip(slots, target, strict=True))


@pytest.mark.parametrize(("most", "sizes"), [(1, [3, 2]), (2, [4])])
def test_a_cycle_that_is_too_long_for_one_part_takes_a_move_more(most: int, sizes: list[int]) -> None:
    """Four experts on two ranks, all of which change ranks."""
    slots, target = (0, 1, 2, 3), (3, 2, 0, 1)
    found: list[int] = []
    while slots != target:
        moves = next_moves(slots, target, 2, most)
        found.append(len(moves))
        slots = moved(slots, moves)
    assert found == sizes


def test_copies_are_taken_from_who_sends_the_least() -> None:
    moves = next_moves((0, 3, 1, 3, 2, 3, 0, 3), (0, 3, 1, 0, 2, 0, 0, 3), 4, 9)
    assert sorted((move.source, move.slot) for move in moves) == [(0, 3), (6, 5)]
