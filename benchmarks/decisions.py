"""What the global scheduler computes for each event, by the size of the fleet and by whether its instances have roles.

    python -m benchmarks.decisions TRACE [--json FILE] [--sizes 10,100,1000,10000] [--rate 1.0] [--scan]

The coarse simulation runs a fleet of modelled H100s under a trace at so many requests per second and instance, with reports every
100 ms; the first seconds are not counted. What is timed is everything that the scheduler does with an event, from being called
to its answers: arrivals, reports (which place who waits) and ends. It is the thread's CPU time, since the machine is shared.
`--scan`: every decision looks at the whole fleet. With `PYTHONPATH=build/compiled:. python -P` it is the compiled scheduler
(`make compiled`); FILE then keeps what it has of the interpreted one, and the other way round. Targets: p50 50 us and p99 250 us
at 10,000 instances. Predictions, written first: a decision looks at about 15 instances and 30 pairs of them, at 2 us each: 60 to
100 us, the same at any size (it was 200 to 270, interpreted); compiled, the same statements take a third: 70 to 90 us, and what
is left is look-ups in memory that no cache holds."""

import gc
import json
import statistics
import time
import timeit
from collections import defaultdict
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from baton.bench.traces import TraceRow, read_trace
from benchmarks.report import parser, write
from cluster.compiled import scheduler_is_compiled
from cluster.events import Event, Send
from cluster.roster import SCAN_UP_TO
from cluster.routing import GlobalScheduler
from core.config import ScheduleConfig
from core.messages import Rejected
from core.types import Slo
from sim.catalogued import Fleet, coarse_config
from sim.coarse.workload import Load, jobs, natural_block_tokens
from sim.coarse.world import Log, simulate

WARM_S = 2.0
REPORT_INTERVAL_S = 0.1
SLO = Slo("chat", 2.0, 0.1)
START_S = 300.0
"""Of the trace."""


class Timed:
    """sim.coarse.world.Scheduler."""

    def __init__(self, scheduler: GlobalScheduler) -> None:
        self._scheduler = scheduler
        self.took_s: defaultdict[str, list[float]] = defaultdict(list)
        self.num_refused = 0

    @property
    def num_queued(self) -> int:
        return self._scheduler.num_queued

    def on(self, event: Event, now: float) -> list[Send]:
        began_s = time.thread_time()
        actions = self._scheduler.on(event, now)
        took_s = time.thread_time() - began_s
        if now > WARM_S:
            self.took_s[type(event).__name__].append(took_s)
            self.num_refused += sum(isinstance(action.message, Rejected) for action in actions)
        return actions


@dataclass(frozen=True, slots=True)
class Case:
    size: int
    any_role: bool
    rate: float
    """Requests per second and instance."""
    measured_s: float
    scan_up_to: int


def run(rows: list[TraceRow], case: Case) -> dict[str, Any]:
    half = case.size // 2
    roles = (0, 0, case.size) if case.any_role else (half, case.size - half, 0)
    block_tokens = natural_block_tokens(rows)
    config = coarse_config(Fleet("H100", "llama-3.1-8b", *roles), block_tokens)
    config = replace(config, schedule=ScheduleConfig(report_interval_s=REPORT_INTERVAL_S))
    total_s = WARM_S + case.measured_s
    in_trace = sum(START_S <= row.arrival_s < START_S + total_s for row in rows)
    copies = case.rate * case.size * total_s / in_trace
    work = jobs(Load(rows, total_s, copies, START_S), SLO, block_tokens)
    made: list[Timed] = []

    def make(config: ScheduleConfig, log: Log) -> Timed:
        made.append(Timed(GlobalScheduler(config, log=log, scan_up_to=case.scan_up_to)))
        return made[0]

    gc.collect()
    gc.disable()
    simulate(config, work, make, until_s=total_s)
    gc.enable()
    return {
        "compiled": scheduler_is_compiled(),
        "loop_ns": _loop_ns(),
        "instances": case.size,
        "any_role": case.any_role,
        "rate": case.rate,
        **_summary(made[0]),
    }


def _loop_ns() -> float:
    """A turn of a fixed loop, so that figures of a busy machine can be put beside others."""
    times_s = timeit.repeat("y = x + 2; z = [x, y]", "x = 1", time.thread_time, number=100_000, repeat=9)
    return round(min(times_s) * 1e4, 1)


def _summary(timed: Timed) -> dict[str, Any]:
    found: dict[str, Any] = {"queued": timed.num_queued, "refused": timed.num_refused}
    for name in ("Arrived", "LoadReport", "Finished"):
        if ordered := sorted(timed.took_s[name]):
            found[name] = {
                "events": len(ordered),
                "p50_us": round(statistics.median(ordered) * 1e6, 1),
                "p99_us": round(ordered[int(0.99 * len(ordered))] * 1e6, 1),
                "mean_us": round(statistics.fmean(ordered) * 1e6, 1),
            }
    return found


def _of_the_other(path: Path) -> list[dict[str, Any]]:
    """What the file has of the scheduler as it is not here: compiled or interpreted."""
    known: list[dict[str, Any]] = json.loads(path.read_text())["results"] if path.exists() else []
    return [one for one in known if one.get("compiled", False) != scheduler_is_compiled()]


def main() -> None:
    options = parser(__doc__)
    options.add_argument("trace", type=Path)
    options.add_argument("--sizes", default="10,100,1000,10000")
    options.add_argument("--rate", type=float, default=1.0, help="requests per second and instance")
    options.add_argument(
        "--events", type=int, default=4000, help="arrivals to time at each size, at least 1 s"
    )
    options.add_argument("--scan", action="store_true", help="look at the whole fleet each time")
    args = options.parse_args()
    rows = [row for row in read_trace(args.trace) if row.input_tokens < 300_000]
    results: list[dict[str, Any]] = []
    for size in (int(part) for part in args.sizes.split(",")):
        for any_role in (False, True):
            measured_s = min(60.0, max(1.0, args.events / args.rate / size))
            case = Case(size, any_role, args.rate, measured_s, size if args.scan else SCAN_UP_TO)
            results.append(run(rows, case))
            print(json.dumps(results[-1]), flush=True)
    flags = f" --rate {args.rate:g}{' --scan' if args.scan else ''}"
    known = _of_the_other(args.json) if args.json else []
    write(args.json, f"benchmarks.decisions {args.trace.name}{flags}", {"results": known + results})


if __name__ == "__main__":
    main()
