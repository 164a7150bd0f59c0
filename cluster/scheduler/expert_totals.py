"""Adds up the expert counts of all instances: all serve the same model, so their routers' choices are comparable."""

from collections.abc import Iterable

from core.reports import LayerExperts


def total(instances: Iterable[tuple[LayerExperts, ...]]) -> tuple[LayerExperts, ...]:
    """Return the counts of each layer."""
    found: dict[int, LayerExperts] = {}
    for layers in instances:
        for one in layers:
            known = found.get(one.layer, LayerExperts(one.layer, 1.0, (0,) * len(one.counts)))
            counts = tuple(a + b for a, b in zip(known.counts, one.counts, strict=True))
            found[one.layer] = LayerExperts(
                one.layer, max(known.imbalance, one.imbalance), counts, known.num_moves + one.num_moves
            )
    return tuple(found[layer] for layer in sorted(found))
