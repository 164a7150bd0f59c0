"""What the global scheduler computes for each event, by the size of the fleet and by whether its instances have roles.

    python -m benchmarks.scheduler.decisions TRACE [--json FILE] [--sizes 10,100,1000,10000] [--rate 1.0] [--replays 5] [--scan]

The coarse simulation runs a fleet of modelled H100s under a trace at so many requests per second and instance, with reports every
100 ms, and records what its scheduler is told and decides (`recorded_scheduler`). That is then told to a new scheduler, event by
event as they are read from the file, as a scheduler's process does it with its mail; what it decides must be the same, line by
line. What is timed is everything that the scheduler does with an event, from being called to its answers: arrivals, reports
(which place who waits) and ends, of which the first seconds are not counted. It is the thread's CPU time, since the machine is
shared; of `--replays` of them, the median. `--scan`: every decision looks at the whole fleet. With `PYTHONPATH=build/compiled:.
python -P` it is the compiled scheduler (`make compiled`); FILE then keeps what it has of the interpreted one, and the other way
round. Targets: p50 50 us and p99 250 us at 10,000 instances. Predictions, written first: a decision looks at about 15
instances and 30 pairs of them, at 2 us each: 60 to 100 us, the same at any size (it was 200 to 270, interpreted); compiled, the
same statements take a third: 70 to 90 us, and what is left is look-ups in memory that no cache holds. Timed between the steps of
the simulation, whose 10,000 devices leave nothing of it in a cache, a decision takes up to twice as long as in a process of its
own."""

import gc
import json
import statistics
import time
import timeit
from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from baton.bench.traces import TraceRow, read_trace
from benchmarks.report import parser, write
from cluster.scheduler.compiled import scheduler_is_compiled
from cluster.scheduler.fleet.roster import SCAN_UP_TO
from cluster.scheduler.global_scheduler import GlobalScheduler
from cluster.scheduler.recorded_scheduler import RecordedScheduler, read
from core.config.cluster_config import ScheduleConfig
from core.types import Slo
from sim.catalogued import Fleet, coarse_config
from sim.coarse.coarse_workload import Load, jobs, natural_block_tokens
from sim.coarse.world import Log, simulate

WARM_S = 2.0
REPORT_INTERVAL_S = 0.1
SLO = Slo(name="chat", ttft_s=2.0, tpot_s=0.1, hopeless="refuse")
START_S = 300.0
"""Seconds into the trace."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    size: int
    any_role: bool
    rate: float
    """Requests per second and instance."""
    measured_s: float
    scan_up_to: int
    num_replays: int


def run(rows: list[TraceRow], case: Case) -> dict[str, Any]:
    half = case.size // 2
    roles = (0, 0, case.size) if case.any_role else (half, case.size - half, 0)
    block_tokens = natural_block_tokens(rows)
    config = coarse_config(
        Fleet(gpu="H100", model="llama-3.1-8b", num_prefill=roles[0], num_decode=roles[1], num_both=roles[2]),
        block_tokens,
    )
    config = replace(config, schedule=ScheduleConfig(report_interval_s=REPORT_INTERVAL_S))
    total_s = WARM_S + case.measured_s
    in_trace = sum(START_S <= row.arrival_at < START_S + total_s for row in rows)
    copies = case.rate * case.size * total_s / in_trace
    work = jobs(Load(rows=rows, duration_s=total_s, copies=copies, start_at=START_S), SLO, block_tokens)
    with TemporaryDirectory() as folder:
        path = Path(folder) / "recording"

        def make(config: ScheduleConfig, _: Log) -> RecordedScheduler:
            return RecordedScheduler(config, path, case.scan_up_to)

        simulate(config, work, make, ends_at=total_s)
        replays = [replayed(path, case) for _ in range(case.num_replays)]
    return {
        "compiled": scheduler_is_compiled(),
        "loop_ns": _loop_ns(),
        "instances": case.size,
        "any_role": case.any_role,
        "rate": case.rate,
        **_summary(replays),
    }


def replayed(path: Path, case: Case) -> tuple[dict[str, list[float]], float]:
    """(sorted times that a scheduler took for each kind of event; what a full collection of what it then has takes, in seconds).

    Raises AssertionError when it decides something else."""
    gc.collect()
    gc.freeze()
    gc.disable()  # as the process of a scheduler does it while it has requests (`core.garbage`)
    config, items = read(path)
    decided = deque[str]()
    scheduler = GlobalScheduler(config, log=decided.append, scan_up_to=case.scan_up_to)
    took_s: defaultdict[str, list[float]] = defaultdict(list)
    for item in items:
        if isinstance(item, str):
            assert decided.popleft() == item
            continue
        event, now = item
        began_at = time.thread_time()
        scheduler.on(event, now)
        if now > WARM_S:
            took_s[type(event).__name__].append(time.thread_time() - began_at)
    gc.enable()
    began_at = time.thread_time()
    gc.collect()
    collection_s = time.thread_time() - began_at
    gc.unfreeze()
    return {name: sorted(times) for name, times in took_s.items()}, collection_s


def _loop_ns() -> float:
    """A turn of a fixed loop, so that figures of a busy machine can be put beside others."""
    times_s = timeit.repeat("y = x + 2; z = [x, y]", "x = 1", time.thread_time, number=100_000, repeat=9)
    return round(min(times_s) * 1e4, 1)


def _summary(replays: Sequence[tuple[dict[str, list[float]], float]]) -> dict[str, Any]:
    collection_s = statistics.median(seconds for _, seconds in replays)
    found: dict[str, Any] = {"replays": len(replays), "full_collection_ms": round(collection_s * 1e3, 1)}
    for name in ("RequestArrived", "LoadReport", "Finished"):
        if ordered := [times[name] for times, _ in replays if name in times]:
            found[name] = {
                "events": len(ordered[0]),
                "p50_us": _median_us([statistics.median(times) for times in ordered]),
                "p99_us": _median_us([times[int(0.99 * len(times))] for times in ordered]),
                "mean_us": _median_us([statistics.fmean(times) for times in ordered]),
            }
    return found


def _median_us(times_s: Sequence[float]) -> float:
    return round(statistics.median(times_s) * 1e6, 1)


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
    options.add_argument("--replays", type=int, default=5)
    options.add_argument("--scan", action="store_true", help="look at the whole fleet each time")
    args = options.parse_args()
    if args.smoke:
        args.sizes, args.events, args.replays = "10", 10, 1
    rows = [row for row in read_trace(args.trace) if row.input_tokens < 300_000]
    results: list[dict[str, Any]] = []
    for size in (int(part) for part in args.sizes.split(",")):
        for any_role in (False, True):
            measured_s = min(60.0, max(1.0, args.events / args.rate / size))
            case = Case(
                size=size,
                any_role=any_role,
                rate=args.rate,
                measured_s=measured_s,
                scan_up_to=size if args.scan else SCAN_UP_TO,
                num_replays=args.replays,
            )
            results.append(run(rows, case))
            print(json.dumps(results[-1]), flush=True)
    flags = f" --rate {args.rate:g}{' --scan' if args.scan else ''}"
    known = _of_the_other(args.json) if args.json else []
    write(args.json, f"benchmarks.scheduler.decisions {args.trace.name}{flags}", {"results": known + results})


if __name__ == "__main__":
    main()
