"""Up to which rate a target is never missed: the goodput of an operator, who does not choose the rate.

    python -m benchmarks.goodput.goodput_sure --traces ../shared/traces --cells benchmarks/results/goodput.json
        [--schedulers baton sarathi] [--targets 0.99] [--processes 1] [--json FILE]

`benchmarks.goodput.goodput` finds a rate at which a target is held by bisection, and so may find a lucky one: in a window of
170 requests of which one may miss, a scheduler can miss at 1.5, 1.8 and 2.0 requests a second and hold at 2.19. Here rates go
up from 0.3 times what could be sustained (`sim.bound`) in steps of 5 %, and what counts is the last one before the first miss.
Windows are those of `benchmarks.goodput.goodput`, whose file (CELLS) says the bounds and the ratios of fixed roles, without
hopeless ones.

Predicted, after a look at one window: at 99 % 1.15 times the best dynamic baseline (1.07 by bisection), since what decides there
is luck with one request of a hundred, which a scheduler that misses few at any rate needs less of; at 90 % as by bisection."""

import json
import multiprocessing
from functools import partial
from pathlib import Path
from statistics import geometric_mean
from typing import Any

from rich.progress import track

from benchmarks.goodput.goodput import NUM_GPUS, SLOS, fleet_of, window
from benchmarks.report import parser, write
from sim.baselines.table import SCHEDULERS
from sim.goodput import attained

FIRST_SHARE, STEP, LAST_SHARE = 0.3, 1.05, 1.5
SMOKE = {"first_share": 0.02, "step": 4.0}
"""Traces that are made up for a test may be heavier than those whose bounds are known."""

Task = tuple[Path, str, float, str, int, float]
"""(traces, trace/targets/seed, target, scheduler, prefill instances, bound in requests per second and GPU)"""


def highest_sure(
    task: Task, first_share: float = FIRST_SHARE, step: float = STEP
) -> tuple[str, str, str, float]:
    """(target, window, scheduler, requests per second and GPU)"""
    folder, where, target, name, num_prefill, bound = task
    trace, slo, seed = where.split("/")
    part = window(folder, trace, int(seed))
    fleet, per_copy = fleet_of(num_prefill), part.rate / NUM_GPUS
    sure, rate = 0.0, first_share * bound
    while rate <= LAST_SHARE * bound:
        if (
            attained(
                part, rate / per_copy, int(seed), SLOS[slo], fleet=fleet, entry=SCHEDULERS[name], least=target
            )
            < target
        ):
            break
        sure, rate = rate, rate * step
    return f"{target:g}", where, name, sure


def tasks(folder: Path, found: dict[str, Any], schedulers: list[str], targets: list[float]) -> list[Task]:
    prefills = {
        (where, name): cell["num_prefill"]
        for key, cell in found["cells"].items()
        for where, name, _ in [key.rsplit("/", 2)]
    }
    return [
        (
            folder,
            where,
            target,
            name,
            prefills[where, name],
            found["bound"][f"{where}/{target:g}"]["sustained"],
        )
        for target in targets
        for where in found["summary"][f"{target:g}"]["windows"]
        for name in schedulers
    ]


def against(rates: dict[str, dict[str, float]], ours: str, other: str) -> dict[str, float]:
    """`_missed_from_the_start`: windows in which a scheduler misses at the very first rate; the means are without them."""
    both = [where for where in rates[ours] if rates[ours][where] and rates[other][where]]
    ratios = [rates[ours][where] / rates[other][where] for where in both]
    return {
        "geometric_mean": round(geometric_mean(ratios), 3),
        "worst_window": round(min(ratios), 3),
        "windows_above": sum(ratio > 1.01 for ratio in ratios),
        "windows_below": sum(ratio < 0.99 for ratio in ratios),
        **{
            f"{name}_missed_from_the_start": sum(not r for r in rates[name].values())
            for name in (ours, other)
        },
    }


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--traces", type=Path, required=True)
    options.add_argument("--cells", type=Path, required=True)
    options.add_argument(
        "--schedulers", nargs="*", default=["baton", "sarathi"], help="The first is compared."
    )
    options.add_argument("--targets", nargs="*", type=float, default=[0.99])
    options.add_argument("--processes", type=int, default=1)
    args = options.parse_args()
    todo = tasks(args.traces, json.loads(args.cells.read_text()), args.schedulers, args.targets)
    if args.smoke:
        todo = [task for task in todo if task[1] == todo[0][1]]
    rates: dict[str, dict[str, dict[str, float]]] = {}
    with multiprocessing.get_context("spawn").Pool(args.processes) as pool:
        for target, where, name, rate in track(
            pool.imap_unordered(partial(highest_sure, **(SMOKE if args.smoke else {})), todo), total=len(todo)
        ):
            rates.setdefault(target, {}).setdefault(name, {})[where] = round(rate, 4)
    ours, *others = args.schedulers
    summary = {
        target: {other: against(of, ours, other) for other in others if len(of[other]) == len(of[ours])}
        for target, of in rates.items()
    }
    print(json.dumps(summary, indent=1))
    command = (
        "benchmarks.goodput.goodput_sure --traces ../shared/traces --cells benchmarks/results/goodput.json"
    )
    names = f" --schedulers {' '.join(args.schedulers)} --targets {' '.join(map(str, args.targets))}"
    ordered = {
        target: {name: dict(sorted(of[name].items())) for name in args.schedulers}
        for target, of in rates.items()
    }
    write(args.json, command + names, {"ours": ours, "against": summary, "rates": ordered})


if __name__ == "__main__":
    main()
