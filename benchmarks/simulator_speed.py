"""How many requests and events a second of a processor the coarse simulation takes, and where its time goes, by the fleet's size.

Each instance is offered 100 requests a minute of the Azure conversation trace, so that 1,000 instances get 100,000. Times are of
the processor, which a busy machine does not lengthen much; they are taken at each simulated second after `--warm`, and an
hour is put at 3,600 such seconds. Prefix caches are full, and evict, from about 200 s on. What the file has of the other kind
(interpreted or compiled) or of another `--warm` is kept, so that one file has all.

Predicted after a trial: compiled, without a search for garbage, 4,000 requests/s at 1,000 instances (an hour: 25 minutes), half
of it the scheduler's; full caches cost a quarter more; interpreted 1,200.

    python -m benchmarks.simulator_speed TRACE --json benchmarks/results/simulator_speed.json
    PYTHONPATH=build/compiled:. python -P -m benchmarks.simulator_speed TRACE ...     (after `make compiled`)"""

import cProfile
import json
import pstats
import resource
import time
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from rich.progress import track

from baton.bench.traces import read_trace
from benchmarks.report import parser, write
from cluster.compiled import scheduler_is_compiled
from cluster.events import Event, Send
from core.config import ScheduleConfig
from core.types import Slo
from sim.catalogued import Fleet, coarse_config
from sim.coarse.workload import Load, jobs
from sim.coarse.world import CoarseOutcome, Log, Scheduler, production, simulate
from sim.workload import Row

PER_INSTANCE_PER_S = 100 / 60
SLO = Slo("speed", 2.0, 0.1)
_ROOT = Path(__file__).parents[1]
PARTS = ("cluster", "sim", "engine", "core")


@dataclass(slots=True)
class Timed:
    """A scheduler, and how long it took."""

    scheduler: Scheduler
    took_s: float = 0.0

    @property
    def num_queued(self) -> int:
        return self.scheduler.num_queued

    def on(self, event: Event, now: float) -> list[Send]:
        began = time.process_time()
        actions = self.scheduler.on(event, now)
        self.took_s += time.process_time() - began
        return actions


@dataclass(slots=True)
class Clocked:
    """Processor seconds at simulated ones, as `simulate` asks whether it is enough."""

    seen: list[tuple[float, float]] = field(default_factory=list[tuple[float, float]])

    def __call__(self, now: float) -> bool:
        self.seen.append((now, time.process_time()))
        return False

    def per_second(self, warm_s: float) -> float:
        """Of the processor for a simulated one, after `warm_s`."""
        steady = [point for point in self.seen if point[0] >= warm_s]
        return (steady[-1][1] - steady[0][1]) / (steady[-1][0] - steady[0][0])


def run(
    rows: list[Row], num_instances: int, until_s: float, timed: list[Timed] | None = None
) -> tuple[CoarseOutcome, Clocked]:
    """A fleet's first `until_s` seconds; with `timed` its scheduler is put there."""
    rate = sum(row.arrival_s < until_s for row in rows) / until_s
    work = jobs(Load(rows, until_s, num_instances * PER_INSTANCE_PER_S / rate), SLO, 64)
    config = coarse_config(Fleet("H100", "llama-3.1-8b", 0, 0, num_instances), 64)

    def make(schedule: ScheduleConfig, log: Log) -> Scheduler:
        scheduler = production(schedule, log)
        if timed is None:
            return scheduler
        timed.append(Timed(scheduler))
        return timed[-1]

    clocked = Clocked()
    return simulate(config, work, make, until_s=until_s, enough=clocked), clocked


def scheduler_share(rows: list[Row], num_instances: int, until_s: float) -> float:
    timed: list[Timed] = []
    _, clocked = run(rows, num_instances, until_s, timed)
    return timed[0].took_s / (clocked.seen[-1][1] - clocked.seen[0][1])


def where(rows: list[Row], num_instances: int, until_s: float) -> dict[str, float]:
    """Shares of a profiled run's own time, by package of ours; the rest is Python's."""
    profile = cProfile.Profile()
    profile.enable()
    run(rows, num_instances, until_s)
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


def measure(rows: list[Row], num_instances: int, warm_s: float, seconds: float) -> dict[str, Any]:
    """The scheduler's share, and the profile, are of the first `seconds`; compiled functions are not seen by a profile."""
    share = scheduler_share(rows, num_instances, seconds)
    profile = {} if scheduler_is_compiled() else {"profile": where(rows, num_instances, seconds)}
    outcome, clocked = run(rows, num_instances, warm_s + seconds)
    each_s = clocked.per_second(warm_s)
    events = outcome.num_events / len(outcome.jobs)
    requests_per_s = num_instances * PER_INSTANCE_PER_S / each_s
    return {
        "compiled": scheduler_is_compiled(),
        "instances": num_instances,
        "warm_s": warm_s,
        "seconds": seconds,
        "requests": len(outcome.jobs),
        "events_of_a_request": round(events, 1),
        "events_per_s": round(events * requests_per_s),
        "requests_per_s": round(requests_per_s),
        "s_of_each_simulated_s": round(each_s, 4),
        "an_hour_takes_min": round(each_s * 60, 1),
        "scheduler_share": round(share, 3),
        "peak_memory_gb": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20, 1),
        **profile,
    }


def kind(result: dict[str, Any]) -> tuple[bool, float, int]:
    return result["compiled"], result["warm_s"], result["instances"]


def main() -> None:
    options = parser(__doc__)
    options.add_argument("trace", type=Path)
    options.add_argument("--sizes", nargs="*", type=int, default=[10, 100, 1000])
    options.add_argument("--warm", type=float, default=5.0, metavar="S")
    options.add_argument("--seconds", type=float, default=10.0, metavar="S")
    args = options.parse_args()
    rows = cast(list[Row], read_trace(args.trace))
    known = json.loads(args.json.read_text())["results"] if args.json and args.json.exists() else []
    results = {kind(result): result for result in known}
    for size in track(args.sizes):
        result = measure(rows, size, args.warm, args.seconds)
        results[kind(result)] = result
        print(json.dumps(result))
    load = "100 requests a minute and instance; H100, llama-3.1-8b, any role"
    ordered = [results[key] for key in sorted(results)]
    write(args.json, f"benchmarks.simulator_speed {args.trace.name}", {"load": load, "results": ordered})


if __name__ == "__main__":
    main()
