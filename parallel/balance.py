"""Which experts stand where, so that all ranks get about as many rows: hot experts are copied into spare slots.

A placement lists the expert of each slot, rank after rank, of each rank as many. Rows share an expert's copies evenly, so a copy
carries its expert's load divided by their number. Invariant: every expert has a slot, and no rank has two copies of one.

Copies are made as in DeepSeek's EPLB (github.com/deepseek-ai/EPLB): each spare slot goes to the expert whose copies carry the
most, which makes the heaviest copy as light as possible. They are packed by longest processing time first, and then improved by
swaps, which EPLB does not do."""

import heapq
from collections.abc import Sequence

from parallel.plans import even_part

Placement = tuple[int, ...]
_LEAST_GAIN = 0.02
"""Weights are moved only where the busiest rank's load falls by this share."""


def first_placement(num_experts: int, num_ranks: int, num_spare: int) -> Placement:
    """Return the placement before any load is known."""
    if not num_spare:
        return tuple(range(num_experts))
    return place([1] * num_experts, num_ranks, num_spare)


def place(loads: Sequence[float], num_ranks: int, num_spare: int) -> Placement:
    """Return slots for all experts and `num_spare` copies: together a multiple of `num_ranks`, at most `num_ranks` for each
    expert."""
    per_rank, left = divmod(len(loads) + num_spare, num_ranks)
    assert not left
    copies = _copies(loads, num_ranks, num_spare)
    weights = [load / count for load, count in zip(loads, copies, strict=True)]
    held: list[set[int]] = [set() for _ in range(num_ranks)]
    carried = [0.0] * num_ranks
    order = sorted(range(len(loads)), key=lambda expert: (-weights[expert], expert))
    for expert in order:
        for _ in range(copies[expert]):
            rank = _room_for(expert, held, carried, weights, per_rank)
            held[rank].add(expert)
            carried[rank] += weights[expert]
    _swap_while_better(held, carried, weights)
    return tuple(expert for own in held for expert in sorted(own))


def rebalance(slots: Placement, loads: Sequence[float], num_ranks: int) -> Placement:
    """Return a placement of the same size in which experts stay where they can; `slots` itself where these loads would gain
    little."""
    found = place(loads, num_ranks, len(slots) - len(loads))
    if busiest(found, loads, num_ranks) > (1 - _LEAST_GAIN) * busiest(slots, loads, num_ranks):
        return slots
    per_rank = len(slots) // num_ranks
    old, new = _by_rank(slots, num_ranks), _by_rank(found, num_ranks)
    out: list[int] = []
    for before, after in zip(old, _same_ranks(old, new), strict=True):
        coming = iter(sorted(set(after) - set(before)))
        out += [expert if expert in after else next(coming) for expert in before]
    assert len(out) == per_rank * num_ranks
    return tuple(out)


def rank_loads(slots: Placement, loads: Sequence[float], num_ranks: int) -> list[float]:
    copies = [0] * len(loads)
    for expert in slots:
        copies[expert] += 1
    return [sum(loads[e] / copies[e] for e in own) for own in _by_rank(slots, num_ranks)]


def busiest(slots: Placement, loads: Sequence[float], num_ranks: int) -> float:
    return max(rank_loads(slots, loads, num_ranks))


def imbalance(slots: Placement, loads: Sequence[float], num_ranks: int) -> float:
    """Return the busiest rank's load by the mean; 1 where there is none."""
    total = sum(loads)
    return busiest(slots, loads, num_ranks) * num_ranks / total if total else 1.0


def _by_rank(slots: Placement, num_ranks: int) -> list[Placement]:
    return [slots[slice(*even_part(len(slots), num_ranks, rank))] for rank in range(num_ranks)]


def _copies(loads: Sequence[float], num_ranks: int, num_spare: int) -> list[int]:
    copies = [1] * len(loads)
    heap = [(-load, expert) for expert, load in enumerate(loads) if num_ranks > 1]
    heapq.heapify(heap)
    for _ in range(num_spare):
        _, expert = heap[0]
        copies[expert] += 1
        if copies[expert] < num_ranks:
            heapq.heapreplace(heap, (-loads[expert] / copies[expert], expert))
        else:
            heapq.heappop(heap)
    return copies


def _room_for(
    expert: int, held: list[set[int]], carried: list[float], weights: list[float], per_rank: int
) -> int:
    """Return the least loaded rank with a free slot and without `expert`. A slot is made where there is none."""
    ranks = range(len(held))
    free = [rank for rank in ranks if len(held[rank]) < per_rank]
    good = [rank for rank in free if expert not in held[rank]]
    if good:
        return min(good, key=lambda rank: (carried[rank], rank))
    # Every rank with a free slot has a copy of `expert`. So another expert moves there from a full rank without a copy: it has
    # one, at least, that the rank with the free slot lacks.
    full = next(rank for rank in ranks if expert not in held[rank])
    moving = min(held[full] - held[free[0]], key=lambda other: (-weights[other], other))
    held[full].remove(moving)
    held[free[0]].add(moving)
    carried[full] -= weights[moving]
    carried[free[0]] += weights[moving]
    return full


def _swap_while_better(held: list[set[int]], carried: list[float], weights: list[float]) -> None:
    """Exchange pairs of experts while that makes the busiest rank's load smaller and no other's as large. It ends, since loads
    fall each time."""
    while swap := _best_swap(held, carried, weights):
        top, other, ours, theirs = swap
        held[top] ^= {ours, theirs}
        held[other] ^= {ours, theirs}
        moved = weights[ours] - weights[theirs]
        carried[top] -= moved
        carried[other] += moved


def _best_swap(
    held: list[set[int]], carried: list[float], weights: list[float]
) -> tuple[int, int, int, int] | None:
    top = max(range(len(held)), key=lambda rank: (carried[rank], -rank))
    best, found = carried[top] * (1 - 1e-9), None
    for other in range(len(held)):
        if other == top:
            continue
        for ours in sorted(held[top] - held[other]):
            for theirs in sorted(held[other] - held[top]):
                moved = weights[ours] - weights[theirs]
                highest = max(carried[top] - moved, carried[other] + moved)
                if highest < best:
                    best, found = highest, (top, other, ours, theirs)
    return found


def _same_ranks(old: list[Placement], new: list[Placement]) -> list[Placement]:
    """Return `new` in an order in which each rank keeps many of the experts it has: the most alike are matched first."""
    pairs = sorted(
        ((len(set(a) & set(b)), i, j) for i, a in enumerate(old) for j, b in enumerate(new)),
        key=lambda pair: (-pair[0], pair[1], pair[2]),
    )
    chosen: dict[int, int] = {}
    taken: set[int] = set()
    for _, i, j in pairs:
        if i not in chosen and j not in taken:
            chosen[i] = j
            taken.add(j)
    return [new[chosen[i]] for i in range(len(old))]
