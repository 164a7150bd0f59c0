"""Goodput beyond what Baton was tuned on: baselines at full strength, other loads, other devices.

    python -m benchmarks.goodput wide --traces ../shared/traces [--windows agents/interactive/0 ...] [--devices base ...]
        [--schedulers ...] [--target 0.9] [--steps 7] [--processes 1] [--hours 24] [--again] [--json FILE]

Cells that the output file has are not run again, and it is written after each. Each says of which code it is; with `--again`
those of other code are run anew. Every device comes with all windows before the next, so that a run that was cut short says
something of all windows. Beside the rates are the bounds of each window and device (`sim.bound`), which know the future: where
1.25 times the best baseline is above them, no scheduler can be so much better. Sessions have none, since their turns come when
others have ended.

Each router of `sim.baselines` is run as its authors run it and with any role, with early rejection and on Baton's engine
(`sim.baselines.table`); one of each is left out by name. `baton:2` has fixed roles, with two prefill instances of four.
Windows are those of `benchmarks.goodput.loads`.
Devices (`benchmarks.goodput.devices`) are an H100 with prefill or memory at half or twice its speed, or with a slower link, an
A100 and an L40S; instances of several GPUs are a model of 70B on four H100s, and quantised ones with routed experts. Their rates
are for each instance, not for each GPU.
Prediction, written first: with early rejection and any role a baseline reaches 0.9 of Baton at 90 %, and on Baton's engine 0.95;
where prompts are hopeless (agents, synthetic) Baton is below it."""

import json
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.goodput.devices import DEVICES
from benchmarks.goodput.loads import Cell
from benchmarks.goodput.report import Bounds, by_bounds, ratios
from benchmarks.goodput.search import code, curve_of, highest, is_due, limits_of, run_all
from benchmarks.report import parser, write
from sim.baselines.table import OURS

WINDOWS = (
    "azure-chat/interactive/0",
    "sharegpt/interactive/0",
    "conversation/standard/0",
    "azure-code/mixed/0",
    "synthetic/standard/0",
    "agents/interactive/0",
)
ROUTERS = (
    "sarathi",
    "sarathi+refuse",
    "sarathi+refuse+engine",
    "least-loaded+any+refuse",
    "mooncake+any",
    "mooncake+any+engine",
    "dynamo+any+refuse",
    "llm-d+any+refuse",
    "polyserve+refuse",
)
_GUESS = 10.0
_SLOW = {"conversation": 6.0, "synthetic": 6.0}
"""About how many times as slowly as the others these are served, which says where searches begin."""


def run_cell(cell: Cell, target: float, max_steps: int) -> tuple[str, dict[str, Any]]:
    """Return its highest rate, in requests per second and instance. Its curve is a bound below the target: runs are cut."""
    curve, per_copy = curve_of(cell, target), cell.rate_per_copy
    guess = _GUESS / per_copy / _SLOW.get(cell.trace, 1.0)
    found = highest(curve, target, guess, max_steps=max_steps)
    return cell.key, {
        "goodput": round(found * per_copy, 4),
        "curve": curve.by_rate(per_copy),
        "code": code(),
    }


def bound_of(cell: Cell, target: float) -> dict[str, float] | None:
    if (limits := limits_of(cell)) is None:
        return None
    found = {"window": limits.ever(target), "long run": limits.sustained(target)}
    return {name: round(copies * cell.rate_per_copy, 4) for name, copies in found.items()}


def find_bounds(traces: Path, keys: Sequence[str], bounds: Bounds, target: float) -> None:
    """Add the bounds that are missing for these cells."""
    for key in keys:
        window, device, scheduler = key.split("|")
        if f"{window}|{device}" not in bounds:
            bounds[f"{window}|{device}"] = bound_of(Cell(traces, window, device, scheduler), target)


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--traces", type=Path, required=True)
    options.add_argument("--windows", nargs="*", default=[*WINDOWS], help="trace/targets/seed[/seconds]")
    options.add_argument("--devices", nargs="*", choices=[*DEVICES], default=["base"])
    options.add_argument("--schedulers", nargs="*", default=[OURS, *ROUTERS])
    options.add_argument("--target", type=float, default=0.9)
    options.add_argument("--steps", type=int, default=7, help="The most rates that a search tries.")
    options.add_argument("--processes", type=int, default=1)
    options.add_argument(
        "--hours", type=float, default=24.0, help="Then it stops; go on with the same command."
    )
    options.add_argument(
        "--again", action="store_true", help="Also the cells of the file that other code made."
    )
    args = options.parse_args()
    if args.smoke:
        args.windows, args.steps = ["azure-code/mixed/0", "agents/interactive/0"], 1
        args.schedulers = [OURS, "sarathi+refuse+engine"]
    ends_at = time.monotonic() + args.hours * 3600
    found: dict[str, Any] = {"cells": {}, "bounds": {}}
    if args.json and args.json.exists():
        found |= json.loads(args.json.read_text())
    cells = found["cells"]
    all_cells = [
        Cell(args.traces, w, d, s) for d in args.devices for w in args.windows for s in args.schedulers
    ]
    find_bounds(args.traces, [*cells, *(cell.key for cell in all_cells)], found["bounds"], args.target)
    save = partial(_write, args.json, args.target, args.steps, found)
    save()
    todo = [cell for cell in all_cells if is_due(cells.get(cell.key), again=args.again)]
    measure = partial(run_cell, target=args.target, max_steps=args.steps)
    for key, cell in run_all(measure, todo, processes=args.processes, ends_at=ends_at):
        cells[key] = cell
        print(f"{cell['goodput']:8.2f}  {key}", flush=True)
        save()
    print(
        json.dumps({"ours_by_others": ratios(cells), "by_bound": by_bounds(cells, found["bounds"])}, indent=1)
    )


def _write(path: Path | None, target: float, max_steps: int, found: dict[str, Any]) -> None:
    command = f"benchmarks.goodput wide --traces ../shared/traces --target {target:g} --steps {max_steps}"
    cells, bounds = found["cells"], found["bounds"]
    content = {
        "ours_by_others": ratios(cells),
        "by_bound": by_bounds(cells, bounds),
        "bounds": dict(sorted(bounds.items())),
        "cells": dict(sorted(cells.items())),
    }
    write(path, command, content)
