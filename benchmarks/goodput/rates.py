"""What share of a window's requests schedulers serve within both targets, rate by rate.

    python -m benchmarks.goodput rates --traces ../shared/traces [--window conversation/long-context/0] [--from 0.8] [--to 2.4]
        [--step 0.03] [--schedulers sarathi polyserve baton] [--json FILE]

`known` searches each scheduler's highest rate by bisection, which takes it that whoever misses the target at a rate misses it at
all higher ones. A window of 170 requests of which one may miss it holds no such thing for sure. Prediction, written first (for
the one window in which Baton is below another): both curves cross 99 % more than once, within the search's 8 %."""

import json
from pathlib import Path
from typing import Any

from rich.progress import track

from benchmarks.goodput.known import TARGETS, task_of
from benchmarks.goodput.search import in_time
from benchmarks.report import parser, write


def holding(curve: dict[str, float], target: float) -> dict[str, float]:
    """The highest rate at which the target is held, and the highest below which it is never missed."""
    held = [float(rate) for rate, share in curve.items() if share >= target]
    missed = [float(rate) for rate, share in curve.items() if share < target]
    sure = [rate for rate in held if rate < min(missed, default=float("inf"))]
    return {"highest": max(held, default=0.0), "highest_of_all_below": max(sure, default=0.0)}


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--traces", type=Path, required=True)
    options.add_argument("--window", default="conversation/long-context/0", help="trace/targets/seed")
    options.add_argument("--from", dest="first", type=float, default=0.8)
    options.add_argument("--to", dest="last", type=float, default=2.4)
    options.add_argument("--step", type=float, default=0.03)
    options.add_argument("--schedulers", nargs="*", default=["sarathi", "polyserve", "baton"])
    args = options.parse_args()
    if args.smoke:
        args.first, args.last, args.step = 0.5, 1.0, 0.5  # an overloaded fleet takes long to simulate
    rates = [args.first + index * args.step for index in range(int((args.last - args.first) / args.step) + 1)]
    cells = {name: task_of(args.traces, args.window, name, 0)[1] for name in args.schedulers}
    curves: dict[str, dict[str, float]] = {name: {} for name in cells}
    for rate in track(rates):
        for name, cell in cells.items():
            curves[name][f"{rate:.3f}"] = round(in_time(cell, rate / cell.rate_per_copy), 4)
    summary: dict[str, Any] = {
        name: {f"{target:g}": holding(curve, target) for target in TARGETS} for name, curve in curves.items()
    }
    print(json.dumps(summary, indent=1))
    command = f"benchmarks.goodput rates --traces ../shared/traces --window {args.window}"
    write(args.json, command, {"window": args.window, "summary": summary, "curves": curves})


if __name__ == "__main__":
    main()
