"""The highest rate of a trace that a fleet serves with enough requests within their targets: bisection over superposed copies.

Goodput is requests per second and instance offered at that rate; a refused or unfinished request has missed."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import isfinite

from core.types import Slo
from sim.baselines.sarathi import token_budget
from sim.baselines.table import Entry
from sim.catalogued import Fleet, coarse_config
from sim.coarse.coarse_workload import Load, jobs
from sim.coarse.simulated_sequence import SimulatedRequest
from sim.coarse.world import simulate
from sim.outcome_report import attainment, served_coarsely
from sim.trace_workload import Row

_PRECISION = 1.08
_MAX_STEPS = 9


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
        return Load(
            rows=self.rows, duration_s=self.duration_s, copies=copies, start_s=self.start_s, seed=seed
        )


def attained(
    window: Window, copies: float, seed: int, slo: Slo, *, fleet: Fleet, entry: Entry, least: float = 0.0
) -> float:
    """Share of the requests that held both targets. A run is cut short once it is less than `least`: then how many could still
    have held them."""
    work = jobs(window.load(copies, seed), slo, window.block_tokens)
    if not work:
        return 1.0
    budget = 0 if entry.paced else token_budget(fleet.step_model, slo.tpot_s)
    config = replace(coarse_config(fleet, window.block_tokens), mixed_batch_tokens=budget)

    watch = _Watch(work, slo, least)
    outcome = simulate(config, work, entry.make, enough=watch)
    return watch.possible if watch.possible < least else attainment(served_coarsely(outcome), slo)


class _Watch:
    """Counts those that have missed for certain while a run goes on."""

    def __init__(self, work: Sequence[SimulatedRequest], slo: Slo, least: float) -> None:
        self._work, self._slo, self._least = work, slo, least
        self.possible = 1.0
        """Share that may still hold both targets."""

    def __call__(self, now: float) -> bool:
        missed = sum(_has_missed(job, self._slo, now) for job in self._work)
        self.possible = 1 - missed / len(self._work)
        return self.possible < self._least


def _has_missed(job: SimulatedRequest, slo: Slo, now: float) -> bool:
    due_s = job.request.arrival_s + slo.ttft_s
    if job.rejected or min(job.first_s, now) > due_s:
        return True
    return isfinite(job.last_s) and job.last_s - job.first_s > slo.tpot_s * max(1, job.num_output - 1)


def highest(
    measure: Callable[[float], float],
    wanted: float,
    guess: float,
    precision: float = _PRECISION,
    max_steps: int = _MAX_STEPS,
) -> float:
    """Return the largest argument at which the falling `measure` is still `wanted`; 0 where there is none. An argument
    `precision` times as large is too large."""
    low, high, at = 0.0, 0.0, guess
    for _ in range(max_steps):
        if measure(at) >= wanted:
            low = at
        else:
            high = at
        if low and high:
            if high / low < precision:
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
