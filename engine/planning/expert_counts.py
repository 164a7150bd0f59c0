"""How often each expert of an instance was chosen, counted up for its reports."""

from collections.abc import Iterable

from core.plan import ExpertLoad
from core.reports import LayerExperts


class ExpertCounts:
    """Counts of all layers since the instance began."""

    def __init__(self) -> None:
        self._layers: dict[int, LayerExperts] = {}
        self._changed = False

    def add(self, loads: Iterable[ExpertLoad]) -> None:
        for load in loads:
            known = self._layers.get(load.layer)
            counts = load.counts
            if known is not None:
                counts = tuple(a + b for a, b in zip(known.counts, counts, strict=True))
            self._layers[load.layer] = LayerExperts(load.layer, load.imbalance, counts, load.num_moves)
            self._changed = True

    def drain(self, *, again: bool = False) -> tuple[LayerExperts, ...]:
        """Return the counts of all layers if any is new since the last call; with `again` in any case."""
        if not (self._changed or again):
            return ()
        self._changed = False
        return tuple(self._layers[layer] for layer in sorted(self._layers))
