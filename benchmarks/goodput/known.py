"""Goodput of every scheduler on every trace, per GPU: the simulator's answer to who serves more within its targets.

Predicted before the first run: least-loaded leads the static ones on short prompts and the cache-aware ones on the conversation
trace; aggregation wins where prompts are short and the time per token is loose; early rejection pays only above capacity, which
goodput at 99 % never reaches.

    python -m benchmarks.goodput known --traces ../shared/traces --json benchmarks/results/goodput.json

Cells that the output file has are not run again; --hours bounds the time, --processes 2 halves it, --schedulers runs some only.
Every trace comes with its first seed before any comes with its second, so that a run that was cut short says something of all."""

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from rich.progress import track

from benchmarks.goodput.devices import GPU, MODEL
from benchmarks.goodput.loads import NUM_INSTANCES, SLOS, TRACES, WINDOW_S, Cell
from benchmarks.goodput.report import SPLIT, summarise
from benchmarks.goodput.search import MAX_STEPS, curve_of, highest, limits_of, run_all
from benchmarks.report import parser, write
from sim.baselines.table import OURS, SCHEDULERS

GRID = [
    (trace, slo)
    for trace in TRACES
    for slo in (("standard", "long-context") if trace == "conversation" else ("interactive", "standard"))
]
"""The conversation's prompts, of up to 85,000 tokens, leave nobody a chance at 450 ms."""
TARGETS = (0.9, 0.99)
Grid = Sequence[tuple[str, str]]
"""(trace, targets)"""
Task = tuple[str, Cell]
"""A cell, and its name in the results: trace/targets/seed/scheduler/prefill instances."""


def task_of(folder: Path, where: str, name: str, num_prefill: int) -> Task:
    """`where` is trace/targets/seed. With no prefill instances any instance does either role."""
    scheduler = OURS if name == SPLIT else name
    fixed = f":{num_prefill}" if num_prefill else ""
    return f"{where}/{name}/{num_prefill}", Cell(folder, where, "base", scheduler + fixed)


def run_cell(task: Task, max_steps: int) -> tuple[str, dict[str, Any]]:
    """Search one scheduler's rates. What its curve says below the first target is a bound: such runs are cut short."""
    name, cell = task
    curve, per_copy, limits = curve_of(cell, TARGETS[0]), cell.rate_per_copy, limits_of(cell)
    assert limits is not None, "a window"
    began = time.perf_counter()
    goodput = {
        f"{target:g}": highest(curve, target, limits.guess / 2, max_steps=max_steps) * per_copy
        for target in TARGETS
    }
    return name, {
        "goodput": goodput,
        "num_prefill": cell.fleet.num_prefill,
        "wall_s": time.perf_counter() - began,
        "curve": curve.by_rate(per_copy),
    }


def tuned_ratio(cells: Mapping[str, Any], trace: str, slo: str) -> int:
    """Return the prefill instances with which least-loaded serves most on the first window."""
    return max(
        range(1, NUM_INSTANCES),
        key=lambda num: cells[f"{trace}/{slo}/0/least-loaded/{num}"]["goodput"]["0.9"],
    )


def tuning(folder: Path, grid: Grid) -> Iterator[Task]:
    for trace, slo in grid:
        for num_prefill in range(1, NUM_INSTANCES):
            yield task_of(folder, f"{trace}/{slo}/0", "least-loaded", num_prefill)


def study(
    folder: Path, grid: Grid, cells: Mapping[str, Any], seeds: int, schedulers: Sequence[str]
) -> Iterator[Task]:
    for seed in range(seeds):
        for trace, slo in grid:
            ratio = tuned_ratio(cells, trace, slo)
            for name in schedulers:
                is_split = name == SPLIT or SCHEDULERS[name].kind == "static"
                yield task_of(folder, f"{trace}/{slo}/{seed}", name, ratio if is_split else 0)


def bounds(folder: Path, grid: Grid, seeds: int) -> dict[str, dict[str, float]]:
    """Return the requests per second and GPU that no scheduler can exceed, by trace, targets, seed and attainment."""
    found: dict[str, dict[str, float]] = {}
    places = [f"{trace}/{slo}/{seed}" for trace, slo in grid for seed in range(seeds)]
    for where in track(places, "bounds"):
        _, cell = task_of(folder, where, OURS, 0)
        limits, per_copy = limits_of(cell), cell.rate_per_copy
        assert limits is not None, "a window"
        for target in TARGETS:
            found[f"{where}/{target:g}"] = {
                "sustained": limits.sustained(target) * per_copy,
                "ever": limits.ever(target) * per_copy,
            }
    return found


def main() -> None:
    options = parser(__doc__, must_write=True)
    options.add_argument("--traces", type=Path, required=True)
    options.add_argument("--seeds", type=int, default=5)
    options.add_argument(
        "--hours", type=float, default=24.0, help="Then it stops; go on with the same command."
    )
    options.add_argument("--processes", type=int, default=1)
    options.add_argument("--schedulers", nargs="*", default=[SPLIT, *SCHEDULERS], help="Only these.")
    options.add_argument("--again", nargs="*", default=[], help="Schedulers whose cells are measured anew.")
    args = options.parse_args()
    grid, seeds = ([("azure-code", "standard")], 1) if args.smoke else (GRID, args.seeds)
    ends_at = time.monotonic() + args.hours * 3600
    found: dict[str, Any] = json.loads(args.json.read_text()) if args.json.exists() else {"cells": {}}
    cells = {name: cell for name, cell in found["cells"].items() if name.split("/")[3] not in args.again}
    measure = partial(run_cell, max_steps=2 if args.smoke else MAX_STEPS)

    def run(tasks: Iterator[Task]) -> None:
        todo = [task for task in tasks if task[0] not in cells and time.monotonic() < ends_at]
        for name, cell in run_all(measure, todo, processes=args.processes, ends_at=ends_at):
            cells[name] = cell
            _write(args.json, found | {"cells": cells})

    run(tuning(args.traces, grid))
    if time.monotonic() < ends_at:
        run(study(args.traces, grid, cells, seeds, args.schedulers))
    bound = bounds(args.traces, grid, seeds)
    summary = summarise(cells, bound)
    _write(args.json, {"cells": cells, "bound": bound, "summary": summary})
    print(json.dumps(summary, indent=1))


def _write(path: Path, found: Mapping[str, Any]) -> None:
    setup = {
        "fleet": f"{NUM_INSTANCES} x {GPU}, {MODEL}, roofline of sim/catalogue/catalogue.py",
        "window_s": WINDOW_S,
        "slos": {name: {"ttft_s": slo.ttft_s, "tpot_s": slo.tpot_s} for name, slo in SLOS.items()},
        "engine": "baton simulate --coarse",
    }
    content = {name: found[name] for name in ("cells", "bound", "summary") if name in found}
    write(path, "benchmarks.goodput known --traces ../shared/traces", {"setup": setup, **content})


if __name__ == "__main__":
    main()
