"""How many events and requests a second the coarse simulation takes, and where its time goes, for fleets of several sizes.

Each instance is offered 100 requests a minute of the Azure conversation trace, so that 1,000 instances get 100,000. Times are of
the processor, which a busy machine does not lengthen much; an hour is put at so many times a steady second, from the difference
between a longer and a shorter run (what is done once for each instance is left out, and said apart).

Predicted after a look at 1.5 s of 1,000 instances (45,000 events a second of the processor, most of it spent on beginnings): 800
requests a second, an hour in two hours, half of the time in the scheduler. The target is minutes.

    python -m benchmarks.simulator_speed TRACE --out benchmarks/results/simulator_speed.json"""

import argparse
import cProfile
import json
import platform
import pstats
import time
from collections import defaultdict
from pathlib import Path
from typing import Any, cast

from rich.progress import track

from baton.bench.traces import read_trace
from core.types import Slo
from sim.catalogued import Fleet, coarse_config
from sim.coarse.workload import Load, jobs
from sim.coarse.world import CoarseOutcome, simulate
from sim.workload import Row

PER_INSTANCE_PER_S = 100 / 60
SLO = Slo("speed", 2.0, 0.1)
_ROOT = Path(__file__).parents[1]
PARTS = ("cluster", "sim", "engine", "core")


def run(rows: list[Row], num_instances: int, seconds: float) -> tuple[CoarseOutcome, float]:
    """What happened, and the processor's time for it."""
    rate = sum(row.arrival_s < seconds for row in rows) / seconds
    work = jobs(Load(rows, seconds, num_instances * PER_INSTANCE_PER_S / rate), SLO, 64)
    config = coarse_config(Fleet("H100", "llama-3.1-8b", 0, 0, num_instances), 64)
    began = time.process_time()
    outcome = simulate(config, work)
    return outcome, time.process_time() - began


def where(rows: list[Row], num_instances: int, seconds: float) -> dict[str, float]:
    """Shares of a profiled run's own time, by package of ours; the rest is Python's."""
    profile = cProfile.Profile()
    profile.enable()
    run(rows, num_instances, seconds)
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


def measure(rows: list[Row], num_instances: int, seconds: float) -> dict[str, Any]:
    _, short_s = run(rows, num_instances, seconds)
    outcome, long_s = run(rows, num_instances, 2 * seconds)
    steady_s = (long_s - short_s) / seconds
    return {
        "instances": num_instances,
        "requests": len(outcome.jobs),
        "events": outcome.num_events,
        "engine_steps": outcome.num_steps,
        "events_per_s": round(outcome.num_events / long_s),
        "requests_per_s": round(len(outcome.jobs) / long_s),
        "steady_s_of_each_simulated_s": round(steady_s, 3),
        "once_s": round(max(0.0, 2 * short_s - long_s), 2),
        "an_hour_takes_min": round(steady_s * 60, 1),
        "time": where(rows, num_instances, seconds),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("trace", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--sizes", nargs="*", type=int, default=[10, 100, 1000])
    parser.add_argument("--seconds", type=float, default=4.0)
    args = parser.parse_args()
    rows = cast(list[Row], read_trace(args.trace))
    results = [measure(rows, size, args.seconds) for size in track(args.sizes)]
    setup = {
        "python": platform.python_version(),
        "load": "azure2023_conv, 100 requests a minute and instance; H100, llama-3.1-8b, any role",
        "command": "python -m benchmarks.simulator_speed TRACE --out benchmarks/results/simulator_speed.json",
    }
    args.out.write_text(json.dumps({"setup": setup, "results": results}, indent=1) + "\n")
    print(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
