"""What each rule and constant of the law of placement brings: switched off alone, halved and doubled alone.

    python -m benchmarks.goodput ablate --traces ../shared/traces --json ROWS.jsonl [--only "risk" "half delay_weight" ...]
        [--loads sustained bursts ...] [--num-loads 3] [--seeds 3] [--budget MINUTES] [--workers 1] [--no-constants] [--report]

Every load (`benchmarks.goodput.ablation_loads`) is run at one rate, near the highest that the full law serves, on the same
arrivals with and without the rule (`benchmarks.goodput.rules`). The rate is searched once, and kept in the file. Each run is a
line of the file, written when it ends: the same command goes on, and runs of other code are made again. What says most comes
first: every rule on every load with one set of arrivals, then with more, then constants. `--only` names rules, constants or
variants. `--report` prints what the file says (`benchmarks.goodput.ablation_report`) and runs nothing.

All runs are of the coarse simulation, which composes steps as production does (ADR 110) and takes a twentieth of the full one's
time. The time that is left is told from the processor time of the runs that the file has: each load's own mean, and for others
the mean of those.

Predictions, written first: half of the rules bring less than 0.3 points in the mean; `late leave half`, `later contexts` and
`late binding` bring more than a point; halving or doubling changes less than half a point for two of three constants."""

import json
import time
from argparse import Namespace
from collections import defaultdict
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from statistics import fmean
from typing import Any

from baton.bench.bench_report import machine
from benchmarks.goodput.ablation_loads import BY_KIND, AblationLoad, in_turn
from benchmarks.goodput.ablation_report import report
from benchmarks.goodput.ablation_runs import FULL, Task, find_knee, run, variants
from benchmarks.goodput.search import code, run_all
from benchmarks.report import commit, parser


class Rows:
    """The file: a line for what made it, one for each load's rate, one for each run."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.rates: dict[str, float] = {}
        self.runs: dict[tuple[str, str, int], dict[str, Any]] = {}
        """(load, variant, arrivals) -> the row of that run, with the code of now."""
        self.num_others = 0
        """The number of runs of other code."""
        lines = path.read_text().splitlines() if path.exists() else []
        for line in lines:
            self._take(json.loads(line))
        if not lines:
            made = datetime.now(UTC).isoformat(timespec="seconds")
            command = "python -m benchmarks.goodput ablate --traces ../shared/traces"
            self.add({"command": command, "date": made, "commit": commit(), "machine": machine()})

    def add(self, row: dict[str, Any]) -> None:
        """Write a row, and take it in."""
        with self._path.open("a") as file:
            file.write(json.dumps(row) + "\n")
        self._take(row)

    def _take(self, row: dict[str, Any]) -> None:
        if "rate" in row:
            self.rates[row["load"]] = row["rate"]
        elif "variant" in row:
            known = variants().get(row["variant"], {"": 0.0})
            is_ours = row["changed"] == {name: str(value) for name, value in known.items()}
            if is_ours and row["code"] == code():
                self.runs[row["load"], row["variant"], row["arrivals"]] = row
            else:
                self.num_others += 1

    def in_time(self, load: AblationLoad, arrivals: int) -> dict[str, str] | None:
        """Return who was in time under the full law; None where that was not run."""
        full = self.runs.get((load.name, FULL, arrivals))
        return None if full is None else full["in_time"]

    def time_for(self, loads: Sequence[str]) -> str:
        """Return about how long a run of each of these takes."""
        by_load = defaultdict[str, list[float]](list)
        for (load, _, _), row in self.runs.items():
            by_load[load].append(row["cpu_s"])
        means = {load: fmean(seconds) for load, seconds in by_load.items()}
        if not means:
            return "as long as the first of them will show"
        usual = fmean(means.values())
        return f"about {sum(means.get(load, usual) for load in loads) / 3600:.1f} core-hours"


def chosen(only: Sequence[str], *, with_constants: bool) -> tuple[list[str], list[str]]:
    """Return (variants without a rule, variants of constants) that `only` names; all where it is empty. Raises ValueError."""
    rules = [name for name in variants() if name.startswith("without ")]
    others = [name for name in variants() if name != FULL and name not in rules]
    if not only:
        return rules, others if with_constants else []
    wanted = {name for name in variants() for word in only if name == word or name.partition(" ")[2] == word}
    if unknown := [
        word for word in only if not any(n == word or n.partition(" ")[2] == word for n in wanted)
    ]:
        raise ValueError(f"unknown: {', '.join(unknown)}; known: {', '.join(variants())}")
    return [name for name in rules if name in wanted], [name for name in others if name in wanted]


def batches(
    loads: Sequence[AblationLoad], seeds: int, names: tuple[Sequence[str], Sequence[str]]
) -> Iterator[tuple[AblationLoad, int, Sequence[str]]]:
    """Yield (load, arrivals, variants) in the order in which they are run."""
    rules, constants = names
    for arrivals in range(seeds):
        for load in loads:
            yield load, arrivals, rules
    for arrivals in range(seeds):
        for load in loads:
            yield load, arrivals, constants


def missing(rows: Rows, todo: Sequence[tuple[AblationLoad, int, Sequence[str]]]) -> list[str]:
    """Return the load of each run that the file lacks."""
    keys = dict.fromkeys(
        (load.name, name, arrivals) for load, arrivals, names in todo for name in (FULL, *names) if names
    )
    return [key[0] for key in keys if key not in rows.runs]


def ablate(rows: Rows, traces: Path, todo: Sequence[Any], *, workers: int, ends_at: float) -> None:
    """Run what is missing, as long as there is time."""
    for load, arrivals, names in todo:
        due = [name for name in names if (load.name, name, arrivals) not in rows.runs]
        if not due or time.monotonic() > ends_at:
            continue
        if load.name not in rows.rates:
            rows.add({"load": load.name, **find_knee(traces, load)})
        rate = rows.rates[load.name]
        if rows.in_time(load, arrivals) is None:
            rows.add(run(Task(traces, load, rate, FULL, arrivals, None)))
        baseline = rows.in_time(load, arrivals)
        tasks = [Task(traces, load, rate, name, arrivals, baseline) for name in due]
        for row in run_all(run, tasks, processes=workers, ends_at=ends_at):
            rows.add(row)


def _options() -> Namespace:
    options = parser(__doc__, must_write=True)
    options.add_argument("--traces", type=Path)
    options.add_argument("--only", nargs="*", default=[], help="rules, constants or variants")
    options.add_argument("--loads", nargs="*", choices=[*BY_KIND], default=[*BY_KIND])
    options.add_argument("--num-loads", type=int, help="the first so many loads")
    options.add_argument("--seeds", type=int, default=3)
    options.add_argument("--budget", type=float, default=float("inf"), metavar="MINUTES")
    options.add_argument("--workers", type=int, default=1)
    options.add_argument("--no-constants", action="store_true")
    options.add_argument("--report", action="store_true")
    args = options.parse_args()
    if not args.report and args.traces is None:
        options.error("--traces: a folder is needed, since runs are to be made")
    return args


def main() -> None:
    args = _options()
    rows = Rows(args.json)
    if not args.report:
        names = chosen(args.only, with_constants=not args.no_constants)
        loads = in_turn(args.loads)[: args.num_loads]
        if args.smoke:
            names, loads, args.seeds = (["without risk"], ["half delay_weight"]), loads[:1], 1
        todo = [*batches(loads, args.seeds, names)]
        left = missing(rows, todo)
        print(f"{len(left)} runs are left: {rows.time_for(left)}", flush=True)
        ends_at = time.monotonic() + args.budget * 60
        ablate(rows, args.traces, todo, workers=args.workers, ends_at=ends_at)
    if rows.num_others:
        print(f"{rows.num_others} runs of other code are left out")
    print(report([*rows.runs.values()]))
