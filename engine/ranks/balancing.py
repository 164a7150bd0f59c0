"""When the experts of an instance move between its ranks, and where to: decided from what the ranks have counted. Pure.

Loads are summed over a window that forgets half of itself at each decision. A layer's experts stay where they are as long as
little would be gained, or little is known."""

import logging
from collections.abc import Iterable, Mapping
from dataclasses import replace

from core.plan import ExpertLoad
from parallel.balance import Placement, imbalance, rebalance

log = logging.getLogger(__name__)

_MIN_CHOICES = 32
"""For each slot of a layer, on average, in the window before its experts are moved."""


class Balancer:
    def __init__(self, first: Placement, num_ranks: int, interval_s: float, now: float) -> None:
        """`first`: where every layer's experts are in the beginning; `interval_s` 0: they stay there."""
        self._first, self._num_ranks, self._interval_s = first, num_ranks, interval_s
        self._due_s = now + interval_s
        self._placements: dict[int, Placement] = {}
        self._window: dict[int, list[int]] = {}

    def observe(self, loads: Iterable[ExpertLoad]) -> tuple[ExpertLoad, ...]:
        """Counts them, and says of each how unevenly its window falls on the ranks."""
        out: list[ExpertLoad] = []
        for load in loads:
            window = self._window.setdefault(load.layer, [0] * len(load.counts))
            for expert, count in enumerate(load.counts):
                window[expert] += count
            found = imbalance(self.placement(load.layer), window, self._num_ranks)
            out.append(replace(load, imbalance=found))
        return tuple(out)

    def placement(self, layer: int) -> Placement:
        return self._placements.get(layer, self._first)

    def decide(self, now: float) -> Mapping[int, Placement]:
        """The layers whose experts are to move before the next step, and where to. Mostly none."""
        if not self._interval_s or now < self._due_s:
            return {}
        self._due_s = now + self._interval_s
        moving: dict[int, Placement] = {}
        for layer, window in self._window.items():
            old = self.placement(layer)
            if sum(window) >= _MIN_CHOICES * len(old):
                new = rebalance(old, window, self._num_ranks)
                if new != old:
                    moving[layer] = new
        if moving:
            self._say(moving)
        self._placements |= moving
        self._window = {layer: [count // 2 for count in window] for layer, window in self._window.items()}
        return moving

    def _say(self, moving: Mapping[int, Placement]) -> None:
        before = [imbalance(self.placement(i), self._window[i], self._num_ranks) for i in moving]
        after = [imbalance(new, self._window[i], self._num_ranks) for i, new in moving.items()]
        log.info(
            "experts of %d layers move: the busiest rank had %.2f times the mean on average (%.2f at most), "
            "and will have %.2f (%.2f)",
            len(moving),
            sum(before) / len(before),
            max(before),
            sum(after) / len(after),
            max(after),
        )
