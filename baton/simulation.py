"""What `baton simulate` runs: a load on a fleet, in full or coarsely, any number of times."""

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import isfinite
from typing import Any, Protocol

from rich.console import Console
from rich.progress import Progress

from baton.bench.traces import TraceRow
from cluster.ingress.delivery import frontend
from core.config.cluster_config import ClusterConfig
from core.errors import ConfigError
from core.types import Slo
from sim.catalogued import Fleet, coarse_config, full_config
from sim.coarse.coarse_workload import Load, jobs, natural_block_tokens
from sim.coarse.gated_scheduler import GatedScheduler
from sim.coarse.simulated_sequence import SimulatedRequest
from sim.coarse.world import production
from sim.coarse.world import simulate as run_coarse
from sim.fleet_changes import Failure, InstanceLife
from sim.outcome_report import ServedRequest, served_in_full, served_job
from sim.simulated_cluster import simulate as run_full
from sim.simulated_run import Arrival
from sim.tenants import TenantGate, Tenants
from sim.trace_workload import arrivals
from sim.virtual_loop import run_virtual

_KNEE = 0.9
_MOST_MORE = 6


class Workload(Protocol):
    """A trace's seconds, or sessions (sim.agent_sessions.SessionLoad)."""

    @property
    def block_tokens(self) -> int: ...
    def arrivals(self, copies: int, seed: int) -> list[Arrival]: ...
    def jobs(self, copies: int, seed: int, slo: Slo) -> list[SimulatedRequest]:
        """In order of arrival, and then those that have no arrival yet, since they follow others."""
        ...


@dataclass(frozen=True, slots=True)
class TraceWorkload:
    """The first `seconds` of a trace, whose clients are tenants where it names them."""

    rows: Sequence[TraceRow]
    seconds: float

    @property
    def block_tokens(self) -> int:
        return natural_block_tokens(self.rows)

    @property
    def names_clients(self) -> bool:
        return any(row.client for row in self.rows)

    def arrivals(self, copies: int, seed: int) -> list[Arrival]:
        return arrivals(self.rows, self.seconds, copies, seed, named=self.names_clients)

    def jobs(self, copies: int, seed: int, slo: Slo) -> list[SimulatedRequest]:
        load = Load(
            rows=self.rows, duration_s=self.seconds, copies=copies, seed=seed, named=self.names_clients
        )
        return jobs(load, slo, self.block_tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class Study:
    """What all runs of one call have in common."""

    workload: Workload
    fleet: Fleet
    slo: Slo
    seconds: float
    seed: int
    coarse: bool
    config: ClusterConfig
    """Its `schedule`, `scaling`, `tenants` and `slo_classes` count."""
    failures: Sequence[Failure] = ()
    cold_start_s: float | None = None

    def __post_init__(self) -> None:
        """Raise ConfigError for what cannot be simulated."""
        fleet, scales = self.fleet, self.cold_start_s is not None
        if self.coarse and (self.failures or scales):
            raise ConfigError("--coarse knows neither failures nor autoscaling: leave it out")
        if scales and fleet.num_both and (fleet.num_prefill or fleet.num_decode):
            raise ConfigError(
                "--autoscale sizes a prefill and a decode pool, or one of any role: with --both say --prefill 0 --decode 0"
            )
        counts = {"prefill": fleet.num_prefill, "decode": fleet.num_decode, "both": fleet.num_both}
        for failure in self.failures:
            if failure.number > counts[failure.role] and not scales:
                raise ConfigError(
                    f"--fail {failure.role}-{failure.number}: the fleet has {counts[failure.role]} of that role"
                )

    @property
    def tenants(self) -> Tenants:
        return Tenants(self.config.tenants, self.config.slo_classes, self.slo)

    def run(self, copies: int) -> tuple[list[ServedRequest], dict[str, Any]]:
        """Return what became of the requests, and figures about the run itself."""
        began = time.perf_counter()
        served, more = self._coarsely(copies) if self.coarse else self._in_full(copies)
        wall_s = time.perf_counter() - began
        return served, more | {"wall_s": wall_s, "requests_per_wall_s": len(served) / wall_s}

    def sweep(self, numbers: Sequence[int]) -> dict[float, list[ServedRequest]]:
        """Run each number of copies and return the runs by rate. Coarse runs go on, with twice as many copies each, until fewer
        than nine in ten requests hold."""
        runs: dict[float, list[ServedRequest]] = {}
        left, more = sorted(numbers), _MOST_MORE
        while left:
            copies = left.pop(0)
            served = self.run(copies)[0]
            rate, num_held = len(served) / self.seconds, sum(one.holds(self.slo) for one in served)
            runs[rate] = served
            Console(stderr=True).print(
                f"{copies} copies, {rate:.3g} requests/s: {num_held / max(1, len(served)):.1%} within both targets",
                highlight=False,
            )
            holds = num_held >= _KNEE * len(served)
            if self.coarse and not left and holds and more:
                left, more = [2 * copies], more - 1
        return runs

    def _in_full(self, copies: int) -> tuple[list[ServedRequest], dict[str, Any]]:
        work, base = self.workload.arrivals(copies, self.seed), full_config(self.fleet, self.slo)
        sections = {name: getattr(self.config, name).model_dump() for name in ("schedule", "scaling")}
        config = replace(
            base,
            overrides={**sections, **base.overrides},
            tenants=self.tenants,
            failures=self.failures,
            cold_start_s=self.cold_start_s,
        )
        if self.failures:  # of which each lost request would tell
            logging.getLogger(frontend.__name__).setLevel(logging.ERROR)
        with _bar() as bar:
            task = bar.add_task("requests", total=len(work))
            outcome = run_virtual(run_full(config, work, finished=lambda: bar.advance(task)))
        served = served_in_full(work, outcome, self.tenants)
        changes = bool(self.failures) or self.cold_start_s is not None
        return served, {"instances": _instances(served, outcome.lives)} if changes else {}

    def _coarsely(self, copies: int) -> tuple[list[ServedRequest], dict[str, Any]]:
        workload, tenants = self.workload, self.tenants
        work = workload.jobs(copies, self.seed, self.slo)
        for job in work:
            job.request = tenants.named(job.request)
        with _bar() as bar:
            task = bar.add_task("arrivals", total=len(work))
            config = replace(coarse_config(self.fleet, workload.block_tokens), schedule=self.config.schedule)
            outcome = run_coarse(
                config,
                [job for job in work if isfinite(job.request.arrival_at)],
                lambda config, log: GatedScheduler(production(config, log), TenantGate(tenants)),
                advanced=lambda count: bar.update(task, completed=count),
            )
        return [served_job(job) for job in work], {
            "num_events": outcome.num_events,
            "num_steps": outcome.num_steps,
            "busy_share": outcome.busy_share,
            "block_tokens": workload.block_tokens,
        }


def _bar() -> Progress:
    """Return a bar that goes on a terminal. Elsewhere it would leave a blank line."""
    console = Console(stderr=True)
    return Progress(console=console, transient=True, disable=not console.is_terminal)


def _instances(served: Sequence[ServedRequest], lives: Sequence[InstanceLife]) -> dict[str, Any]:
    """Return how many instances there were, what they took until the last answer, and when each served."""
    end_at = max((one.at + one.e2e_s for one in served if isfinite(one.e2e_s)), default=0.0)
    ended = [life for life in lives if life.ended_at <= end_at]
    changes = [(life.asked_at, 1) for life in lives] + [(life.ended_at, -1) for life in ended]
    now = most = 0
    for _, change in sorted(changes):
        now += change
        most = max(most, now)
    taken_s = sum(min(life.ended_at, end_at) - min(life.asked_at, end_at) for life in lives)
    return {
        "hours": taken_s / 3600,
        "most": most,
        "started": sum(life.asked_at > 0 for life in lives),
        "ended": len(ended),
        "lives": [
            {
                "role": life.role,
                "asked_s": life.asked_at,
                "serving_s": life.serving_at,
                "ended_s": life.ended_at if life.ended_at <= end_at else None,
            }
            for life in lives
        ],
    }
