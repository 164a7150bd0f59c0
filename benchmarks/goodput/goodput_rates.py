"""What share of a window's requests schedulers serve within both targets, rate by rate: a close look at a window of
`benchmarks.goodput.goodput`.

    python -m benchmarks.goodput.goodput_rates --traces ../shared/traces [--window conversation/long-context/0] [--from 0.8]
    [--to 2.4]
        [--step 0.03] [--schedulers sarathi polyserve baton] [--json FILE]

`benchmarks.goodput.goodput` searches each scheduler's highest rate by bisection, which takes it that whoever misses the target
at a rate misses it at all higher ones. A window of 170 requests of which one may miss it holds no such thing for sure. FILE comes
with a picture. Prediction, written first (for the one window in which Baton is below another): both curves cross 99 % more than
once, within the search's 8 %."""

import json
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot
from rich.progress import track

from benchmarks.goodput.goodput import NUM_GPUS, SLOS, TARGETS, fleet_of, window
from benchmarks.report import parser, write
from sim.baselines.table import SCHEDULERS
from sim.goodput import attained


def draw(curves: dict[str, dict[str, float]], title: str, picture: Path) -> None:
    figure, axes = pyplot.subplots(figsize=(7, 4))
    for name, curve in curves.items():
        axes.plot([float(rate) for rate in curve], list(curve.values()), marker="o", label=name)
    for target in TARGETS:
        axes.axhline(target, color="grey", linewidth=0.8, linestyle="--")
    axes.set(xlabel="requests per second and GPU", ylabel="share within both targets", title=title)
    axes.legend()
    figure.tight_layout()
    figure.savefig(picture, dpi=110)
    pyplot.close(figure)


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
    trace, slo, seed = args.window.split("/")
    part = window(args.traces, trace, int(seed))
    fleet, per_copy = fleet_of(0), part.rate / NUM_GPUS
    if args.smoke:
        args.first, args.last, args.step = 0.5, 1.0, 0.5  # an overloaded fleet takes long to simulate
    rates = [args.first + index * args.step for index in range(int((args.last - args.first) / args.step) + 1)]
    curves: dict[str, dict[str, float]] = {name: {} for name in args.schedulers}
    for rate in track(rates):
        for name, curve in curves.items():
            share = attained(part, rate / per_copy, int(seed), SLOS[slo], fleet=fleet, entry=SCHEDULERS[name])
            curve[f"{rate:.3f}"] = round(share, 4)
    summary: dict[str, Any] = {
        name: {f"{target:g}": holding(curve, target) for target in TARGETS} for name, curve in curves.items()
    }
    print(json.dumps(summary, indent=1))
    content = {"window": args.window, "summary": summary, "curves": curves}
    write(
        args.json,
        f"benchmarks.goodput.goodput_rates --traces ../shared/traces --window {args.window}",
        content,
    )
    if args.json:
        draw(curves, args.window, args.json.with_suffix(".png"))


if __name__ == "__main__":
    main()
