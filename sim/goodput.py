"""The highest rate of a trace that a fleet serves with enough requests within their targets: bisection over superposed copies.

Goodput is requests per second and instance offered at that rate; a refused or unfinished request has missed."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from core.types import Slo
from sim.baselines.sarathi import token_budget
from sim.baselines.table import Entry
from sim.catalogued import Fleet, coarse_config
from sim.coarse.workload import Load, jobs
from sim.coarse.world import simulate
from sim.report import attainment, served_coarsely
from sim.workload import Row

_PRECISION = 1.08
_MAX_STEPS = 9
PATIENCE_S = 30.0
"""After the last arrival; what is not finished by then has missed."""


@dataclass(frozen=True, slots=True)
class Window:
    """`duration_s` of a trace from `start_s` on."""

    rows: Sequence[Row]
    start_s: float
    duration_s: float
    block_tokens: int

    @property
    def rate(self) -> float:
        """Requests per second of one copy."""
        end_s = self.start_s + self.duration_s
        return sum(self.start_s <= row.arrival_s < end_s for row in self.rows) / self.duration_s

    def load(self, copies: float, seed: int) -> Load:
        return Load(self.rows, self.duration_s, copies, self.start_s, seed)


def attained(window: Window, copies: float, seed: int, slo: Slo, fleet: Fleet, entry: Entry) -> float:
    """Share of the requests that held both targets."""
    work = jobs(window.load(copies, seed), slo, window.block_tokens)
    budget = 0 if entry.paced else token_budget(fleet.step_model, slo.tpot_s)
    config = replace(coarse_config(fleet, window.block_tokens), mixed_batch_tokens=budget)
    outcome = simulate(config, work, entry.make, until_s=window.duration_s + PATIENCE_S)
    return attainment(served_coarsely(outcome), slo)


def highest(measure: Callable[[float], float], wanted: float, guess: float) -> float:
    """The largest argument at which the falling `measure` is still `wanted`, within 8 %; 0 where there is none."""
    low, high, at = 0.0, 0.0, guess
    for _ in range(_MAX_STEPS):
        if measure(at) >= wanted:
            low = at
        else:
            high = at
        if low and high:
            if high / low < _PRECISION:
                break
            at = (low * high) ** 0.5
        else:
            at = low * 1.6 if low else high / 1.6
    return low


class Curve:
    """Attainment over copies, remembered, so that several targets share their runs."""

    def __init__(self, measure: Callable[[float], float]) -> None:
        self._measure = measure
        self.points: dict[float, float] = {}

    def __call__(self, copies: float) -> float:
        if copies not in self.points:
            self.points[copies] = self._measure(copies)
        return self.points[copies]
