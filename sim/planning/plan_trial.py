"""One fleet of a plan, simulated on the windows that decide.

Of a large fleet a part is simulated with its part of the load, of each copy as much: a small fleet queues no less than a large
one, so that it errs to the safe side. A run ends as soon as too many have missed, or all that count have ended."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite

from core.types import Slo
from sim.catalogued import mixed_config
from sim.coarse.simulated_sequence import SimulatedRequest
from sim.coarse.world import simulate
from sim.outcome_report import served_job
from sim.planning.plan_effort import Effort
from sim.planning.plan_fleets import Parts, dollars_per_h, name_of
from sim.planning.plan_load import PeakLoad

_FEWEST, _MOST, _MOST_OF_MANY = 2, 8, 4
"""Instances that stand for a larger fleet: as many as divide it best, but no more than the last where the load has more requests
than these."""
_MANY_REQUESTS = 1000
_WORK_OF_A_REQUEST = 10
"""To make a request takes as long as so many events of the simulation."""
_FOLLOWING = 1.5
"""Turns that may come, over those that would were each answered at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    parts: Parts
    attainments: tuple[float, ...]
    """One for each window in turn, up to the first that misses; of a run that was cut short it is at most so much."""
    late_first: float
    """Share of the requests that missed the first token's target, or were refused."""
    slow_tokens: float
    """Share that missed only the time per token."""
    busy_share: float

    @property
    def attained(self) -> float:
        return min(self.attainments)

    @property
    def dollars_per_h(self) -> float:
        return dollars_per_h(self.parts)

    @property
    def name(self) -> str:
        return name_of(self.parts)

    @property
    def limit(self) -> str:
        """Which target is missed by most."""
        if not self.late_first and not self.slow_tokens:
            return "nothing"
        return "time to first token" if self.late_first >= self.slow_tokens else "time per token"


def try_fleet(
    parts: Parts,
    loads: Sequence[PeakLoad],
    slo: Slo,
    *,
    copies: float,
    wanted: float,
    effort: Effort,
) -> Trial | None:
    """Simulate a fleet; None where that takes more than the effort that is left."""
    is_many = copies * max(len(load.columns) for load in loads) > _MANY_REQUESTS
    small, share = stand_in(parts, _MOST_OF_MANY if is_many else _MOST)
    attainments: list[float] = []
    late = slow = busy = 0.0
    for load in loads:
        jobs = load.jobs(copies, slo, share)
        effort.spend(_WORK_OF_A_REQUEST * len(jobs))
        judge = _Judge(jobs, load)
        judge.most_missed = (1 - wanted) * _most_counted(jobs, load, copies * share)
        outcome = simulate(
            mixed_config(small, load.offered.block_tokens),
            [job for job in jobs if isfinite(job.request.arrival_at)],
            enough=judge,
            most_work=effort.left,
        )
        effort.spend(outcome.work)
        if not effort.left:
            return None
        attainments.append(judge.attained)
        late, slow = judge.num_late / judge.num_counted, judge.num_slow / judge.num_counted
        busy = max(busy, outcome.busy_share)
        if judge.attained < wanted:
            break
    return Trial(
        parts=parts,
        attainments=tuple(attainments),
        late_first=late,
        slow_tokens=slow,
        busy_share=busy,
    )


def stand_in(parts: Parts, most: int = _MOST) -> tuple[Parts, float]:
    """Return the fleet of up to `most` instances that is simulated in place of `parts`, and its share of the load."""
    counts = [part.num_units for part in parts]
    total = sum(counts)
    if total <= most:
        return parts, 1.0
    choices = [[max(1, round(count * size / total)) for count in counts] for size in range(_FEWEST, most + 1)]

    def unevenness(choice: list[int]) -> float:
        ratios = [few / count for few, count in zip(choice, counts, strict=True)]
        return max(ratios) / min(ratios)

    best = min(choices, key=unevenness)
    share = max(few / count for few, count in zip(best, counts, strict=True))
    return tuple(part.resized(few) for part, few in zip(parts, best, strict=True)), share


def _most_counted(jobs: Sequence[SimulatedRequest], load: PeakLoad, copies: float) -> float:
    """Return how many requests count; where they follow others, so many as hardly come."""
    if load.follows:
        return _FOLLOWING * copies * len(load.columns)
    return sum(load.lead_s <= job.request.arrival_at < load.end_at for job in jobs)


class _Judge:
    """Counts those that count: what has become of them is asked every simulated second."""

    def __init__(self, jobs: Sequence[SimulatedRequest], load: PeakLoad) -> None:
        self._load = load
        self.most_missed = float("inf")
        """Where more have missed it is decided."""
        self._open = [job for job in jobs if load.follows or self._counts(job)]
        self._num_known = None if load.follows else len(self._open)
        self._num_judged = 0
        self.num_late = 0
        self.num_slow = 0

    @property
    def attained(self) -> float:
        """Share of those that count; of a run that was cut short what it would be, had all others held."""
        return 1 - (self.num_late + self.num_slow) / self.num_counted

    @property
    def num_counted(self) -> int:
        return max(1, self._num_known or self._num_judged)

    def __call__(self, now: float) -> bool:
        """Return whether it is decided."""
        self._open = [job for job in self._open if self._stays_open(job, now)]
        if self.num_late + self.num_slow > self.most_missed:
            return True
        return not self._open and (self._num_known is not None or now >= self._load.end_at)

    def _counts(self, job: SimulatedRequest) -> bool:
        return self._load.lead_s <= job.request.arrival_at < self._load.end_at

    def _stays_open(self, job: SimulatedRequest, now: float) -> bool:
        arrival_at, slo = job.request.arrival_at, job.request.slo
        if not isfinite(arrival_at):
            return now < self._load.end_at
        if not self._counts(job):
            return False
        if job.rejected or min(job.first_at, now) > arrival_at + slo.ttft_s:
            self.num_late += 1
        elif isfinite(job.last_at):
            self.num_slow += not served_job(job).holds(slo)
        else:
            return True
        self._num_judged += 1
        return False
