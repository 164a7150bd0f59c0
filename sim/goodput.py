"""Which share of what is offered a fleet serves within its targets: a trace's window or sessions, in superposed copies.

A refused or unfinished request has missed."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import isfinite
from typing import Protocol

from cluster.scheduler.global_scheduler import GlobalScheduler
from core.config.cluster_config import ScheduleConfig
from core.scheduler_tuning import SchedulerTuning
from core.types import Slo
from sim.baselines.sarathi import token_budget
from sim.baselines.table import Entry
from sim.catalogued import Fleet, coarse_config
from sim.coarse.coarse_workload import Load, jobs
from sim.coarse.simulated_sequence import SimulatedRequest
from sim.coarse.world import CoarseConfig, CoarseOutcome, Log, MakeScheduler, PlacingScheduler, simulate
from sim.outcome_report import served_job
from sim.trace_workload import Row


@dataclass(frozen=True, slots=True)
class Window:
    """`duration_s` of a trace from `start_at` on."""

    rows: Sequence[Row]
    start_at: float
    duration_s: float
    block_tokens: int
    named: bool = False
    """Whether each request's tenant is the trace's client."""

    @property
    def rate(self) -> float:
        """Requests per second of one copy."""
        end_at = self.start_at + self.duration_s
        return sum(self.start_at <= row.arrival_at < end_at for row in self.rows) / self.duration_s

    def load(self, copies: float, seed: int, share: float = 1.0) -> Load:
        return Load(
            rows=self.rows,
            duration_s=self.duration_s,
            copies=copies,
            share=share,
            start_at=self.start_at,
            seed=seed,
            named=self.named,
        )

    def jobs(
        self, copies: float, seed: int, slo: Slo | Sequence[Slo], share: float = 1.0
    ) -> list[SimulatedRequest]:
        return jobs(self.load(copies, seed, share), slo, self.block_tokens)


class Offered(Protocol):
    """What a fleet is asked to serve: a window of a trace, or sessions."""

    @property
    def block_tokens(self) -> int: ...
    def jobs(
        self, copies: float, seed: int, slo: Slo | Sequence[Slo], share: float = 1.0
    ) -> list[SimulatedRequest]:
        """In order of arrival, of several classes in turn. Turns that follow others have no arrival yet. `share`: what is kept
        of each copy, at random."""
        ...


def attained(
    offered: Offered,
    copies: float,
    seed: int,
    slo: Slo | Sequence[Slo],
    *,
    fleet: Fleet,
    entry: Entry,
    least: float = 0.0,
) -> float:
    """Share of the requests that held both targets of their class. A run is cut short once it is less than `least`: then how many
    could still have held them."""
    work = offered.jobs(copies, seed, slo)
    if not work:
        return 1.0
    watch = _Watch(work, least)
    serve(work, offered.block_tokens, fleet=fleet, entry=entry, enough=watch)
    if watch.possible < least:
        return watch.possible
    return sum(served_job(job).holds(job.request.slo) for job in work) / len(work)


def tuned(tuning: SchedulerTuning) -> MakeScheduler:
    """Return what makes a production scheduler with that tuning."""

    def make(config: ScheduleConfig, log: Log) -> PlacingScheduler:
        return GlobalScheduler(config, log=log, tuning=tuning)

    return make


def serve(
    work: Sequence[SimulatedRequest],
    block_tokens: int,
    *,
    fleet: Fleet,
    entry: Entry,
    enough: Callable[[float], bool] = lambda _: False,
    change: Callable[[CoarseConfig], CoarseConfig] = lambda config: config,
) -> CoarseOutcome:
    """Simulate `work`, which is changed, until all has ended or `enough(now)`. `change` makes another fleet of it."""
    budget = 0 if entry.paced else token_budget(fleet.step_model, min(job.request.slo.tpot_s for job in work))
    config = replace(coarse_config(fleet, block_tokens), mixed_batch_tokens=budget)
    first = [job for job in work if isfinite(job.request.arrival_at)]
    return simulate(change(config), first, entry.make, enough=enough)


class _Watch:
    """Counts those that have missed for certain while a run goes on."""

    def __init__(self, work: Sequence[SimulatedRequest], least: float) -> None:
        self._work, self._least = work, least
        self.possible = 1.0
        """Share that may still hold both targets."""

    def __call__(self, now: float) -> bool:
        missed = sum(_has_missed(job, now) for job in self._work)
        self.possible = 1 - missed / len(self._work)
        return self.possible < self._least


def _has_missed(job: SimulatedRequest, now: float) -> bool:
    slo = job.request.slo
    due_at = job.request.arrival_at + slo.ttft_s
    if job.rejected or min(job.first_at, now) > due_at:
        return True
    return isfinite(job.last_at) and job.last_at - job.first_at > slo.tpot_s * max(1, job.num_output - 1)
