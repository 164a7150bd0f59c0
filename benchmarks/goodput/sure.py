"""Up to which rate a target is never missed: the goodput of an operator, who does not choose the rate.

    python -m benchmarks.goodput sure --traces ../shared/traces --cells benchmarks/results/goodput.json
        [--schedulers baton sarathi] [--targets 0.99] [--processes 1] [--json FILE]

`known` finds a rate at which a target is held by bisection, and so may find a lucky one: in a window of 170 requests of which one
may miss, a scheduler can miss at 1.5, 1.8 and 2.0 requests a second and hold at 2.19. Here rates go up from 0.3 times what could
be sustained (`sim.bound`) in steps of 5 %, and what counts is the last one before the first miss. Windows are those of `known`,
whose file (CELLS) says the bounds and the ratios of fixed roles, without hopeless ones.

Predicted, after a look at one window: at 99 % 1.15 times the best dynamic baseline (1.07 by bisection), since what decides there
is luck with one request of a hundred, which a scheduler that misses few at any rate needs less of; at 90 % as by bisection."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import geometric_mean
from typing import Any

from benchmarks.goodput.known import task_of
from benchmarks.goodput.loads import Cell
from benchmarks.goodput.search import in_time, run_all
from benchmarks.report import parser, write

FIRST_SHARE, STEP, LAST_SHARE = 0.3, 1.05, 1.5
SMOKE = {"first_share": 0.02, "step": 4.0}
"""Traces that are made up for a test may be heavier than those whose bounds are known."""


@dataclass(frozen=True, slots=True)
class Task:
    cell: Cell
    name: str
    """The scheduler's."""
    target: float
    bound: float
    """Requests per second and GPU."""


def highest_sure(
    task: Task, first_share: float = FIRST_SHARE, step: float = STEP
) -> tuple[str, str, str, float]:
    """Return (target, window, scheduler, requests per second and GPU)."""
    sure, rate, per_copy = 0.0, first_share * task.bound, task.cell.rate_per_copy
    while rate <= LAST_SHARE * task.bound:
        if in_time(task.cell, rate / per_copy, task.target) < task.target:
            break
        sure, rate = rate, rate * step
    return f"{task.target:g}", task.cell.window, task.name, sure


def tasks(
    folder: Path, found: Mapping[str, Any], schedulers: Sequence[str], targets: Sequence[float]
) -> list[Task]:
    prefills = {
        (where, name): cell["num_prefill"]
        for key, cell in found["cells"].items()
        for where, name, _ in [key.rsplit("/", 2)]
    }
    return [
        Task(
            cell=task_of(folder, where, name, prefills[where, name])[1],
            name=name,
            target=target,
            bound=found["bound"][f"{where}/{target:g}"]["sustained"],
        )
        for target in targets
        for where in found["summary"][f"{target:g}"]["windows"]
        for name in schedulers
    ]


def against(rates: Mapping[str, Mapping[str, float]], ours: str, other: str) -> dict[str, float]:
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
        todo = [task for task in todo if task.cell.window == todo[0].cell.window]
    rates: dict[str, dict[str, dict[str, float]]] = {}
    measure = partial(highest_sure, **(SMOKE if args.smoke else {}))
    for target, where, name, rate in run_all(measure, todo, processes=args.processes):
        rates.setdefault(target, {}).setdefault(name, {})[where] = round(rate, 4)
    ours, *others = args.schedulers
    summary = {
        target: {other: against(of, ours, other) for other in others if len(of[other]) == len(of[ours])}
        for target, of in rates.items()
    }
    print(json.dumps(summary, indent=1))
    command = "benchmarks.goodput sure --traces ../shared/traces --cells benchmarks/results/goodput.json"
    names = f" --schedulers {' '.join(args.schedulers)} --targets {' '.join(map(str, args.targets))}"
    ordered = {
        target: {name: dict(sorted(of[name].items())) for name in args.schedulers}
        for target, of in rates.items()
    }
    write(args.json, command + names, {"ours": ours, "against": summary, "rates": ordered})


if __name__ == "__main__":
    main()
