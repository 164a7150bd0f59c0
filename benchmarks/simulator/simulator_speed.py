"""How many requests and events a second of a processor the coarse simulation takes, and where its time goes, by the fleet's size.

Each instance is offered `--per-minute` requests of the trace, 100 if nothing else is said, so that 1,000 instances get 100,000.
Times are of the processor, which a busy machine does not lengthen much. They are taken at each simulated second after `--warm`,
and an hour is put at 3,600 such seconds. Azure's traces do not say which prompts share a prefix, so that caches keep nothing;
with one that does they are full, and evict, from some minutes on. `--whole` simulates so many seconds, an hour if nothing else
is said, from the first to the last instead, and says how long each of its minutes took. Requests are made as they arrive, in
either case, and that is counted. What the file has of the other kind (interpreted or compiled), of other traces, rates or sizes,
or another `--warm` is kept, so that one file has all.

Predicted after a trial: compiled, without a search for garbage, 4,000 requests/s at 1,000 instances (an hour: 25 minutes), half
of it the scheduler's; interpreted 1,200. Before the whole hour was run, from three minutes on a slow day: 45 minutes.

    python -m benchmarks.simulator.simulator_speed TRACE --json benchmarks/results/simulator_speed.json
    PYTHONPATH=build/compiled:. python -P -m benchmarks.simulator.simulator_speed TRACE ...     (after `make compiled`)
    PYTHONPATH=build/compiled:. python -P -m benchmarks.simulator.simulator_speed TRACE --sizes 1000 --whole ..."""

import cProfile
import json
import pstats
import resource
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from math import isfinite
from pathlib import Path
from typing import Any, cast

from rich.progress import Progress, TimeElapsedColumn, track

from baton.bench.traces import read_trace
from benchmarks.report import parser, write
from cluster.scheduler.compiled import scheduler_is_compiled
from cluster.scheduler.scheduler_events import Event, Send
from core.config.cluster_config import ScheduleConfig
from core.types import Slo
from sim.catalogued import Fleet, coarse_config
from sim.coarse.coarse_workload import Load, arriving, natural_block_tokens
from sim.coarse.simulated_sequence import SimulatedRequest
from sim.coarse.world import CoarseOutcome, Log, PlacingScheduler, production, simulate
from sim.outcome_report import served_job
from sim.trace_workload import Row

SLO = Slo(name="speed", ttft_s=2.0, tpot_s=0.1, hopeless="refuse")
_ROOT = Path(__file__).parents[2]
PARTS = ("cluster", "sim", "engine", "core")


@dataclass(frozen=True, slots=True)
class Offered:
    """What the instances of a fleet, whatever its size, are asked to serve."""

    trace: str
    rows: list[Row]
    per_minute: float
    """Requests for each instance."""

    @property
    def block_tokens(self) -> int:
        return natural_block_tokens(self.rows)

    def load(self, num_instances: int, duration_s: float) -> Load:
        rate = sum(row.arrival_at < duration_s for row in self.rows) / duration_s
        return Load(rows=self.rows, duration_s=duration_s, copies=num_instances * self.per_minute / 60 / rate)


@dataclass(slots=True)
class Timed:
    """A scheduler, and how long it took."""

    scheduler: PlacingScheduler
    took_s: float = 0.0

    @property
    def num_queued(self) -> int:
        return self.scheduler.num_queued

    def on(self, event: Event, now: float) -> list[Send]:
        began = time.process_time()
        actions = self.scheduler.on(event, now)
        self.took_s += time.process_time() - began
        return actions


class Arrivals:
    """The jobs of `duration_s` seconds, each made as it arrives; and how they fared, of which nothing else is kept."""

    def __init__(self, offered: Offered, num_instances: int, duration_s: float) -> None:
        self._load, self._block_tokens = offered.load(num_instances, duration_s), offered.block_tokens
        self._open: deque[SimulatedRequest] = deque()
        self.num_requests = 0
        self.num_in_time = self.num_ended = 0
        """Counts of requests that arrived before the first that has not ended."""

    def __iter__(self) -> Iterator[SimulatedRequest]:
        for job in arriving(self._load, SLO, self._block_tokens):
            self.settle()
            self._open.append(job)
            self.num_requests += 1
            yield job

    def settle(self) -> None:
        while self._open and (isfinite(self._open[0].last_at) or self._open[0].rejected):
            self.num_in_time += served_job(self._open.popleft()).holds(SLO)
            self.num_ended += 1


@dataclass(slots=True)
class Clocked:
    """Processor seconds at simulated ones, as `simulate` asks whether it is enough."""

    advanced: Callable[[float], None] = lambda now: None
    seen: list[tuple[float, float]] = field(default_factory=list[tuple[float, float]])

    def __call__(self, now: float) -> bool:
        self.seen.append((now, time.process_time()))
        self.advanced(now)
        return False

    @property
    def took_s(self) -> float:
        return self.seen[-1][1] - self.seen[0][1]

    def per_second(self, warm_s: float) -> float:
        """Seconds of the processor for a simulated one, after `warm_s`."""
        steady = [point for point in self.seen if point[0] >= warm_s]
        return (steady[-1][1] - steady[0][1]) / (steady[-1][0] - steady[0][0])

    def minutes_s(self) -> list[float]:
        """Seconds of the processor for each simulated minute."""
        marks = [
            next(spent for at, spent in self.seen if at >= start)
            for start in range(0, int(self.seen[-1][0]), 60)
        ]
        return [round(after - before, 1) for before, after in pairwise([*marks, self.seen[-1][1]])]


def run(
    offered: Offered,
    num_instances: int,
    duration_s: float,
    clocked: Clocked,
    timed: list[Timed] | None = None,
) -> tuple[CoarseOutcome, Arrivals]:
    """A fleet's first `duration_s` seconds; with `timed` its scheduler is put there."""
    arrivals = Arrivals(offered, num_instances, duration_s)
    config = coarse_config(
        Fleet(gpu="H100", model="llama-3.1-8b", num_prefill=0, num_decode=0, num_both=num_instances),
        offered.block_tokens,
    )

    def make(schedule: ScheduleConfig, _: Log) -> PlacingScheduler:
        scheduler = production(schedule, lambda _: None)
        if timed is None:
            return scheduler
        timed.append(Timed(scheduler))
        return timed[-1]

    outcome = simulate(config, arrivals, make, ends_at=duration_s, enough=clocked)
    arrivals.settle()
    return outcome, arrivals


def scheduler_share(offered: Offered, num_instances: int, duration_s: float) -> float:
    timed, clocked = list[Timed](), Clocked()
    run(offered, num_instances, duration_s, clocked, timed)
    return timed[0].took_s / clocked.took_s


def where(offered: Offered, num_instances: int, duration_s: float) -> dict[str, float]:
    """Shares of a profiled run's own time, by package of ours; the rest is Python's."""
    profile = cProfile.Profile()
    profile.enable()
    run(offered, num_instances, duration_s, Clocked())
    profile.disable()
    shares: dict[str, float] = defaultdict(float)
    stats = cast(
        dict[tuple[str, int, str], tuple[int, int, float, float, Any]], vars(pstats.Stats(profile))["stats"]
    )
    for (file, _, _), (_, _, own_s, _, _) in stats.items():
        path = Path(file)
        ours = path.is_relative_to(_ROOT) and path.relative_to(_ROOT).parts[0] in PARTS
        shares[path.relative_to(_ROOT).parts[0] if ours else "Python"] += own_s
    total = sum(shares.values())
    return {name: round(share / total, 3) for name, share in sorted(shares.items(), key=lambda kv: -kv[1])}


def measure(offered: Offered, num_instances: int, warm_s: float, seconds: float) -> dict[str, Any]:
    """The scheduler's share, and the profile, are of the first `seconds`; compiled functions are not seen by a profile."""
    share = scheduler_share(offered, num_instances, seconds)
    profile = {} if scheduler_is_compiled() else {"profile": where(offered, num_instances, seconds)}
    clocked = Clocked()
    outcome, arrivals = run(offered, num_instances, warm_s + seconds, clocked)
    each_s = clocked.per_second(warm_s)
    measured = {
        "s_of_each_simulated_s": round(each_s, 4),
        "an_hour_takes_min": round(each_s * 60, 1),
        "scheduler_share": round(share, 3),
        **profile,
    }
    return (
        _result(offered, num_instances, warm_s, seconds, outcome=outcome, arrivals=arrivals, each_s=each_s)
        | measured
    )


def measure_whole(offered: Offered, num_instances: int, seconds: float) -> dict[str, Any]:
    """From the first second to the last."""
    timed = list[Timed]()
    with Progress(*Progress.get_default_columns(), TimeElapsedColumn()) as progress:
        task = progress.add_task(f"{num_instances} instances", total=seconds)
        clocked = Clocked(lambda now: progress.update(task, completed=now))
        outcome, arrivals = run(offered, num_instances, seconds, clocked, timed)
    measured = {
        "took_min": round(clocked.took_s / 60, 1),
        "scheduler_share": round(timed[0].took_s / clocked.took_s, 3),
        "s_of_each_minute": clocked.minutes_s(),
        "in_time_share": round(arrivals.num_in_time / arrivals.num_ended, 4),
    }
    return (
        _result(
            offered,
            num_instances,
            0.0,
            seconds,
            outcome=outcome,
            arrivals=arrivals,
            each_s=clocked.took_s / seconds,
        )
        | measured
    )


def _result(
    offered: Offered,
    num_instances: int,
    warm_s: float,
    seconds: float,
    *,
    outcome: CoarseOutcome,
    arrivals: Arrivals,
    each_s: float,
) -> dict[str, Any]:
    """`each_s`: of the processor for a simulated second."""
    events = outcome.num_events / arrivals.num_requests
    requests_per_s = num_instances * offered.per_minute / 60 / each_s
    return {
        "trace": offered.trace,
        "per_minute_and_instance": offered.per_minute,
        "compiled": scheduler_is_compiled(),
        "instances": num_instances,
        "warm_s": warm_s,
        "seconds": seconds,
        "requests": arrivals.num_requests,
        "events_of_a_request": round(events, 1),
        "events_per_s": round(events * requests_per_s),
        "requests_per_s": round(requests_per_s),
        "peak_memory_gb": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20, 1),
    }


def kind(result: dict[str, Any]) -> tuple[Any, ...]:
    load = result["trace"], result["per_minute_and_instance"]
    return *load, result["compiled"], "took_min" in result, result["warm_s"], result["instances"]


def main() -> None:
    options = parser(__doc__)
    options.add_argument("trace", type=Path)
    options.add_argument("--sizes", nargs="*", type=int, default=[10, 100, 1000])
    options.add_argument(
        "--per-minute", type=float, default=100.0, metavar="N", help="requests for each instance"
    )
    options.add_argument("--warm", type=float, default=5.0, metavar="S")
    options.add_argument("--seconds", type=float, metavar="S", help="10; an hour with --whole")
    options.add_argument("--whole", action="store_true", help="from the first second to the last")
    args = options.parse_args()
    if args.smoke:
        args.sizes, args.warm, args.seconds = [2], 1.0, 2.0
    name = args.trace.name.partition(".")[0]
    offered = Offered(name, cast(list[Row], read_trace(args.trace)), args.per_minute)
    known = json.loads(args.json.read_text())["results"] if args.json and args.json.exists() else []
    results = {kind(result): result for result in known}
    for size in args.sizes if args.whole else track(args.sizes):
        if args.whole:
            result = measure_whole(offered, size, args.seconds or 3600.0)
        else:
            result = measure(offered, size, args.warm, args.seconds or 10.0)
        results[kind(result)] = result
        print(json.dumps(result), flush=True)
    ordered = [results[key] for key in sorted(results)]
    write(
        args.json,
        "benchmarks.simulator.simulator_speed TRACE",
        {"fleet": "H100, llama-3.1-8b, any role", "results": ordered},
    )


if __name__ == "__main__":
    main()
