"""Goodput of every scheduler on every trace, per GPU: the simulator's answer to who serves more within its targets.

Predicted before the first run: least-loaded leads the static ones on short prompts and the cache-aware ones on the conversation
trace; aggregation wins where prompts are short and the time per token is loose; early rejection pays only above capacity, which
goodput at 99 % never reaches.

    python -m benchmarks.goodput.goodput --traces ../shared/traces --json benchmarks/results/goodput.json

Cells that the output file has are not run again; --hours bounds the time, --processes 2 halves it, --schedulers runs some only.
Every trace comes with its first seed before any comes with its second, so that a run that was cut short says something of all."""

import json
import multiprocessing
import platform
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from functools import cache, partial
from pathlib import Path
from typing import Any

from rich.progress import Progress, track

from baton.bench.traces import read_trace
from benchmarks.goodput.goodput_report import summarise
from benchmarks.report import parser
from core.types import Slo
from sim.baselines.table import SCHEDULERS
from sim.bound import Needs
from sim.catalogued import Fleet, engine_of
from sim.coarse.coarse_workload import natural_block_tokens
from sim.goodput import Curve, Window, attained, highest

TRACES = {
    "conversation": "mooncake_fast25_conversation.jsonl.gz",
    "azure-code": "azure2023_code.csv.gz",
    "azure-chat": "azure2023_conv.csv.gz",
    "deepseek-r1": "servegen_deepseek-r1_1h.csv.gz",
    "sharegpt": "sharegpt_llama31_300req_blk16.jsonl.gz",
}
SLOS = {
    "interactive": Slo(name="interactive", ttft_s=0.45, tpot_s=0.04, hopeless="refuse"),
    "standard": Slo(name="standard", ttft_s=2.0, tpot_s=0.1, hopeless="refuse"),
    "long-context": Slo(name="long-context", ttft_s=10.0, tpot_s=0.1, hopeless="refuse"),
}
GRID = [
    (trace, slo)
    for trace in TRACES
    for slo in (("standard", "long-context") if trace == "conversation" else ("interactive", "standard"))
]
"""The conversation's prompts, of up to 85,000 tokens, leave nobody a chance at 450 ms."""
GPU, MODEL, NUM_GPUS = "H100", "llama-3.1-8b", 4
WINDOW_S, FIRST_WINDOW_S, BETWEEN_WINDOWS_S = 20.0, 300.0, 600.0
LEAST_REQUESTS = 30
"""The least requests of a window; where a trace pauses, the next one that has so many is taken."""
TARGETS = (0.9, 0.99)
EVER_PRECISION, EVER_STEPS = 1.01, 24
MAX_STEPS = 9
"""The most steps of a search for the highest rate."""
SPLIT = "baton-split"
"""Our scheduler on a fleet of fixed roles, in the ratio that suits the static ones best."""

Task = tuple[Path, str, str, int, str, int]
"""(traces, trace, targets, seed, scheduler, prefill instances); of these 0: any instance does either role."""
Grid = Sequence[tuple[str, str]]
"""(trace, targets)"""


@cache
def window(folder: Path, trace: str, seed: int, window_s: float = WINDOW_S) -> Window:
    """Each seed has a window of its own, of a trace that is long enough; arrivals are shifted by the seed in any case."""
    rows = read_trace(folder / TRACES[trace])
    start_s = FIRST_WINDOW_S + seed * BETWEEN_WINDOWS_S
    if start_s + window_s > rows[-1].arrival_s:
        start_s = 0.0
    while sum(start_s <= row.arrival_s < start_s + window_s for row in rows) < LEAST_REQUESTS:
        start_s += window_s
    return Window(rows, start_s, window_s, natural_block_tokens(rows))


def fleet_of(num_prefill: int) -> Fleet:
    """With so many prefill instances; of 0 any instance does either role."""
    if not num_prefill:
        return Fleet(gpu=GPU, model=MODEL, num_prefill=0, num_decode=0, num_both=NUM_GPUS)
    return Fleet(gpu=GPU, model=MODEL, num_prefill=num_prefill, num_decode=NUM_GPUS - num_prefill)


class Limits:
    """What no scheduler can exceed on a window (`sim.bound`), in copies of it."""

    def __init__(self, part: Window, slo: Slo | Sequence[Slo], seed: int, fleet: Fleet) -> None:
        self._part, self._slo, self._seed = part, slo, seed
        self._engine = engine_of(fleet, part.block_tokens)

    def sustained(self, target: float) -> float:
        """In the long run: without the time that a short window leaves after its last arrival."""
        least_s = self._needs(1.0).least_s(target)
        return NUM_GPUS * self._part.duration_s / least_s

    def ever(self, target: float) -> float:
        """On the very window that is measured, idle before and after."""

        def share(copies: float) -> float:
            return float(self._needs(copies).can_ever_be(target, NUM_GPUS))

        return highest(share, 1.0, self.guess, EVER_PRECISION, EVER_STEPS) * EVER_PRECISION

    @property
    def guess(self) -> float:
        """Where a search begins: about what the GPUs have time for when none misses who could hold."""
        return self.sustained(TARGETS[0]) or 1.0

    def _needs(self, copies: float) -> Needs:
        work = self._part.jobs(copies, self._seed, self._slo)
        return Needs(work, self._engine, self._part.block_tokens)


def run_cell(task: Task, max_steps: int = MAX_STEPS) -> tuple[str, dict[str, Any]]:
    """One scheduler on one window. What its curve says below the first target is a bound: such runs are cut short."""
    folder, trace, slo_name, seed, name, num_prefill = task
    part, slo = window(folder, trace, seed), SLOS[slo_name]
    fleet = fleet_of(num_prefill)
    entry = SCHEDULERS["baton" if name == SPLIT else name]
    curve = Curve(
        lambda copies: attained(part, copies, seed, slo, fleet=fleet, entry=entry, least=TARGETS[0])
    )
    guess = Limits(part, slo, seed, fleet).guess / 2
    began = time.perf_counter()
    per_copy = part.rate / NUM_GPUS
    goodput = {
        f"{target:g}": highest(curve, target, guess, max_steps=max_steps) * per_copy for target in TARGETS
    }
    cell: dict[str, Any] = {
        "goodput": goodput,
        "num_prefill": num_prefill,
        "wall_s": time.perf_counter() - began,
    }
    cell["curve"] = {
        f"{copies * per_copy:.4g}": round(share, 4) for copies, share in sorted(curve.points.items())
    }
    return key(trace, slo_name, seed, name, num_prefill), cell


def key(trace: str, slo: str, seed: int, name: str, num_prefill: int) -> str:
    return f"{trace}/{slo}/{seed}/{name}/{num_prefill}"


def tuned_ratio(cells: dict[str, Any], trace: str, slo: str) -> int:
    """Prefill instances with which least-loaded serves most on the first window."""
    return max(
        range(1, NUM_GPUS),
        key=lambda p: cells[key(trace, slo, 0, "least-loaded", p)]["goodput"]["0.9"],
    )


def tuning(folder: Path, grid: Grid) -> Iterator[Task]:
    for trace, slo in grid:
        for num_prefill in range(1, NUM_GPUS):
            yield folder, trace, slo, 0, "least-loaded", num_prefill


def study(folder: Path, grid: Grid, cells: dict[str, Any], seeds: int) -> Iterator[Task]:
    for seed in range(seeds):
        for trace, slo in grid:
            ratio = tuned_ratio(cells, trace, slo)
            yield folder, trace, slo, seed, SPLIT, ratio
            for name, entry in SCHEDULERS.items():
                yield folder, trace, slo, seed, name, ratio if entry.kind == "static" else 0


def run(
    tasks: Sequence[Task],
    out: Path,
    result: dict[str, Any],
    processes: int,
    *,
    until_s: float,
    max_steps: int,
) -> bool:
    """Add the cells that are missing, each to the file as it is done; False when time was up before."""
    cells: dict[str, Any] = result["cells"]
    left = [task for task in tasks if key(*task[1:]) not in cells]
    measure = partial(run_cell, max_steps=max_steps)
    with ExitStack() as stack:
        bar = stack.enter_context(Progress())
        progress = bar.add_task("cells", total=len(left))
        found = map(measure, left)
        if processes > 1:
            pool = stack.enter_context(multiprocessing.get_context("spawn").Pool(processes))
            found = pool.imap_unordered(measure, left)
        for name, cell in found:
            cells[name] = cell
            bar.advance(progress)
            save(result, out)
            if time.monotonic() > until_s:
                return False
    return True


def save(result: dict[str, Any], out: Path) -> None:
    """Whole or not at all: a run may be ended at any moment."""
    fresh = out.with_suffix(".tmp")
    fresh.write_text(json.dumps(result, indent=1) + "\n")
    fresh.replace(out)


def bounds(folder: Path, grid: Grid, seeds: int) -> dict[str, dict[str, float]]:
    """Requests per second and GPU that no scheduler can exceed, by trace, targets, seed and attainment."""
    found: dict[str, dict[str, float]] = {}
    for trace, slo in track(grid, "bounds"):
        for seed in range(seeds):
            part = window(folder, trace, seed)
            limits, per_copy = Limits(part, SLOS[slo], seed, fleet_of(0)), part.rate / NUM_GPUS
            for target in TARGETS:
                found[f"{trace}/{slo}/{seed}/{target:g}"] = {
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
    max_steps = 2 if args.smoke else MAX_STEPS
    until_s = time.monotonic() + args.hours * 3600
    result: dict[str, Any] = json.loads(args.json.read_text()) if args.json.exists() else {"cells": {}}
    cells: dict[str, Any] = result["cells"]
    for name in [name for name in cells if name.split("/")[3] in args.again]:
        del cells[name]
    result["setup"] = {
        "fleet": f"{NUM_GPUS} x {GPU}, {MODEL}, roofline of sim/catalogue/catalogue.py",
        "window_s": WINDOW_S,
        "slos": {name: {"ttft_s": slo.ttft_s, "tpot_s": slo.tpot_s} for name, slo in SLOS.items()},
        "engine": "baton simulate --coarse",
        "python": platform.python_version(),
        "command": "python -m benchmarks.goodput.goodput --traces ../shared/traces --json benchmarks/results/goodput.json",
    }
    measure = partial(
        run, out=args.json, result=result, processes=args.processes, until_s=until_s, max_steps=max_steps
    )
    if measure([*tuning(args.traces, grid)]):
        tasks = [task for task in study(args.traces, grid, cells, seeds) if task[4] in args.schedulers]
        measure(tasks)
    result["bound"] = bounds(args.traces, grid, seeds)
    result["summary"] = summarise(result, args.json.with_suffix(".png"))
    save(result, args.json)
    print(json.dumps(result["summary"], indent=1))


if __name__ == "__main__":
    main()
