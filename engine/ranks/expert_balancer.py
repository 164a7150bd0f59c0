"""Decides when the experts of an instance move between its ranks, and where to, from what the ranks have counted.

Loads are summed over a window that forgets half of itself at each decision. A layer's experts stay where they are as long as
little would be gained, or little is known. They move a few at a time, so that no step waits for long."""

import logging
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import replace

from core.plan import ExpertLoad
from parallel.balance import Placement, imbalance, rebalance
from parallel.moves import Move, moved, next_moves

log = logging.getLogger(__name__)

MIN_CHOICES = 32
"""The average number of choices for each slot of a layer that the window must have before the layer's experts move."""


class Balancer:
    def __init__(self, first: Placement, num_ranks: int, interval_s: float, now: float, most: int) -> None:
        """`first` is where every layer's experts are in the beginning; with an `interval_s` of 0 they stay there. A rank
        receives, and sends, at most `most` experts before a step."""
        self._first, self._num_ranks, self._interval_s, self._most = first, num_ranks, interval_s, most
        self._due_at = now + interval_s
        self._placements: dict[int, Placement] = {}
        self._undecided: list[int] = []
        """The layers that are still to be decided in this round, the last one first."""
        self._target: tuple[int, Placement] | None = None
        """The layer whose experts are being moved, and where to."""
        self._num_moves: Counter[int] = Counter()
        self._window: dict[int, list[int]] = {}

    def observe(self, loads: Iterable[ExpertLoad]) -> tuple[ExpertLoad, ...]:
        """Add counts, and return how unevenly each layer's window falls on the ranks."""
        out: list[ExpertLoad] = []
        for load in loads:
            window = self._window.setdefault(load.layer, [0] * len(load.counts))
            for expert, count in enumerate(load.counts):
                window[expert] += count
            num_moves = self._num_moves[load.layer]
            out.append(replace(load, imbalance=self._imbalance(load.layer), num_moves=num_moves))
        return tuple(out)

    def placement(self, layer: int) -> Placement:
        return self._placements.get(layer, self._first)

    def next_moves(self, now: float) -> Mapping[int, tuple[Move, ...]]:
        """Return the experts that change their slots before the next step, by layer: those of one layer at most, and mostly none.

        Layers are decided one by one, the most uneven first, since a decision takes time, too."""
        if self._target is None and not self._undecided and self._interval_s and now >= self._due_at:
            self._due_at = now + self._interval_s
            self._undecided = sorted(self._window, key=self._imbalance)
        if self._target is None and self._undecided:
            self._target = self._decide(self._undecided.pop())
        return {} if self._target is None else self._advance(*self._target)

    def _decide(self, layer: int) -> tuple[int, Placement] | None:
        window, old = self._window[layer], self.placement(layer)
        self._window[layer] = [count // 2 for count in window]
        if sum(window) < MIN_CHOICES * len(old):
            return None
        new = rebalance(old, window, self._num_ranks)
        if new == old:
            return None
        log.info(
            "experts of layer %d move: the busiest rank had %.2f times the mean, and will have %.2f",
            layer,
            imbalance(old, window, self._num_ranks),
            imbalance(new, window, self._num_ranks),
        )
        return layer, new

    def _advance(self, layer: int, target: Placement) -> Mapping[int, tuple[Move, ...]]:
        moves = next_moves(self.placement(layer), target, self._num_ranks, self._most)
        self._placements[layer] = moved(self.placement(layer), moves)
        self._num_moves[layer] += len(moves)
        if self._placements[layer] == target:
            self._target = None
        return {layer: moves}

    def _imbalance(self, layer: int) -> float:
        return imbalance(self.placement(layer), self._window[layer], self._num_ranks)
