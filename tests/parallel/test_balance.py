"""The balancer: what must hold of any placement, and the published algorithm on the same loads."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from parallel.balance import Placement, busiest, first_placement, imbalance, place, rank_loads, rebalance

PUBLISHED = json.loads((Path(__file__).parent / "eplb.json").read_text())
"""Largest rank load by the mean that DeepSeek's EPLB (commit 5791971) finds, by its global and its hierarchical policy. The first
two are the layers of its README's example."""


@st.composite
def cases(draw: st.DrawFn) -> tuple[list[int], int, int]:
    """(loads, ranks, spare slots) that fit."""
    num_ranks, num_experts = draw(st.integers(1, 6)), draw(st.integers(1, 24))
    spares = [n for n in range(num_experts * (num_ranks - 1) + 1) if not (num_experts + n) % num_ranks]
    loads = draw(st.lists(st.integers(0, 1000), min_size=num_experts, max_size=num_experts))
    return loads, num_ranks, draw(st.sampled_from(spares))


def check(slots: Placement, num_experts: int, num_ranks: int, num_slots: int) -> None:
    assert len(slots) == num_slots
    assert set(slots) == set(range(num_experts))
    per_rank = num_slots // num_ranks
    for rank in range(num_ranks):
        own = slots[rank * per_rank : (rank + 1) * per_rank]
        assert len(set(own)) == per_rank, "two copies on one rank"


@given(cases())
def test_every_expert_has_a_slot_and_every_slot_an_expert(case: tuple[list[int], int, int]) -> None:
    loads, num_ranks, num_spare = case
    slots = place(loads, num_ranks, num_spare)
    check(slots, len(loads), num_ranks, len(loads) + num_spare)
    assert place(loads, num_ranks, num_spare) == slots
    assert sum(rank_loads(slots, loads, num_ranks)) == pytest.approx(sum(loads))
    check(first_placement(len(loads), num_ranks, num_spare), len(loads), num_ranks, len(loads) + num_spare)


@given(cases(), st.data())
def test_it_is_never_worse_than_before(case: tuple[list[int], int, int], data: st.DataObject) -> None:
    loads, num_ranks, num_spare = case
    former = data.draw(st.permutations(loads))
    before = place(former, num_ranks, num_spare)
    after = rebalance(before, loads, num_ranks)
    check(after, len(loads), num_ranks, len(before))
    assert busiest(after, loads, num_ranks) <= busiest(before, loads, num_ranks)
    assert rebalance(after, loads, num_ranks) == after
    if after != before:
        per_rank = len(before) // num_ranks
        for slot, (old, new) in enumerate(zip(before, after, strict=True)):
            first = slot - slot % per_rank
            assert old == new or old not in after[first : first + per_rank], "moved on its own rank"


@pytest.mark.parametrize("case", PUBLISHED, ids=lambda case: f"{case['name']}, {case['num_spare']} spare")
def test_it_is_as_good_as_the_published_balancer(case: dict[str, Any]) -> None:
    slots = place(case["loads"], case["num_ranks"], case["num_spare"])
    found = imbalance(slots, case["loads"], case["num_ranks"])
    assert found <= case["eplb_hierarchical"] + 1e-5
    assert found <= case["eplb_global"] * 1.005


def test_hot_experts_are_copied_and_nothing_moves_without_need() -> None:
    loads = [80, 10, 10, 10, 10, 20]
    even = first_placement(6, 4, 2)
    better = rebalance(even, loads, 4)
    assert better.count(0) == 3
    assert imbalance(better, loads, 4) < imbalance(even, loads, 4)
    assert rebalance(better, [load + 1 for load in loads], 4) == better
    assert imbalance(even, [0] * 6, 4) == 1.0
