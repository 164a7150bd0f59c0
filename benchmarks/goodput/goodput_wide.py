"""Goodput beyond what Baton was tuned on: baselines at full strength, other loads, other devices.

    python -m benchmarks.goodput.goodput_wide --traces ../shared/traces [--windows agents/interactive/0 ...] [--devices base ...]
        [--schedulers ...] [--target 0.9] [--steps 7] [--processes 1] [--hours 24] [--again] [--json FILE]

Cells that the output file has are not run again, and it is written after each. Each says of which code it is; with `--again`
those of other code are run anew. Every device comes with all windows before the next, so that a run that was cut short says
something of all windows. Beside the rates are the bounds of each window and device (`sim.bound`), which know the future: where
1.25 times the best baseline is above them, no scheduler can be so much better. Sessions have none, since their turns come when
others have ended.

Each router of `sim.baselines` is run as its authors run it and with any role, with early rejection and on Baton's engine
(`sim.baselines.table`); one of each is left out by name. `baton:2` has fixed roles,
with two prefill instances of four. Windows are those of `benchmarks.goodput.goodput`, and besides: Mooncake's
synthetic trace, agents' sessions in closed loop (`sim.agent_sessions`), and windows whose requests are of two classes in turn.
One of another length than 20 s has its seconds behind it: `deepseek-r1/standard/0/60`. `deepseek-r1+tenants` has the trace's
clients for tenants.
Devices are an H100 with prefill or memory at half or twice its speed, or with a slower link, an A100 and an L40S; instances of
several GPUs are a model of 70B on four H100s, and a quantised one with routed experts on eight H200s. Their rates are for each
instance, not for each GPU. Routed experts of other shapes are those of Mixtral, Qwen3-30B-A3B and gpt-oss-120b
(`benchmarks.goodput.routed_models`).
Prediction, written first: with early rejection and any role a baseline reaches 0.9 of Baton at 90 %, and on Baton's engine 0.95;
where prompts are hopeless (agents, synthetic) Baton is below it."""

import ast
import hashlib
import json
import multiprocessing
import time
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from statistics import geometric_mean
from typing import Any

from rich.progress import track

from baton.bench.traces import read_trace
from benchmarks.goodput.goodput import (
    FIRST_WINDOW_S,
    GPU,
    LEAST_REQUESTS,
    MODEL,
    NUM_GPUS,
    SLOS,
    TRACES,
    WINDOW_S,
    Limits,
)
from benchmarks.goodput.goodput import window as tuned_window
from benchmarks.goodput.plan_questions import MOE
from benchmarks.goodput.routed_models import GPT_OSS, MIXTRAL, QWEN3_30B
from benchmarks.report import parser, write
from core.config.cluster_config import load
from core.errors import ConfigError
from core.types import Slo
from sim.agent_sessions import SessionLoad, read_sessions
from sim.baselines.table import OURS, entry_of
from sim.catalogue.catalogue import GPUS, CatalogueModel, Gpu
from sim.catalogue.model_config import model_of
from sim.catalogued import Fleet
from sim.coarse.coarse_workload import natural_block_tokens
from sim.goodput import Curve, Window, attained, highest

SESSIONS, SYNTHETIC = "agent_lmcache_sessions.jsonl.gz", "mooncake_fast25_synthetic.jsonl.gz"
CLASSES = load(None, {}, {}).slo_classes
TARGETS: dict[str, Slo | tuple[Slo, ...]] = {
    **SLOS,
    "mixed": (CLASSES["interactive"], CLASSES["long-context"]),
}
"""`mixed`: of two requests one is interactive, which has priority, and one may take long."""
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


@dataclass(frozen=True, slots=True)
class Device:
    """What an instance is made of."""

    gpu: Gpu
    model: str = MODEL
    read: CatalogueModel | None = None
    """A model that the catalogue does not have, called `model`."""
    tp: int = 1
    host_bytes: float = 0.0
    """Host memory of an instance for KV."""


_BASE = GPUS[GPU]
_HOST_BYTES = 128e9
"""Half of the 2 TB of a usual server, divided among its eight GPUs."""
DEVICES: dict[str, Device] = {
    "base": Device(_BASE),
    "prefill/2": Device(replace(_BASE, flop_per_s=_BASE.flop_per_s / 2)),
    "prefill*2": Device(replace(_BASE, flop_per_s=_BASE.flop_per_s * 2)),
    "memory/2": Device(replace(_BASE, memory_bytes_per_s=_BASE.memory_bytes_per_s / 2)),
    "memory*2": Device(replace(_BASE, memory_bytes_per_s=_BASE.memory_bytes_per_s * 2)),
    "link/4": Device(replace(_BASE, nic_bytes_per_s=_BASE.nic_bytes_per_s / 4)),
    "link 1 GB/s": Device(replace(_BASE, nic_bytes_per_s=1e9)),
    "base+host": Device(_BASE, host_bytes=_HOST_BYTES),
    "memory/2+host": Device(
        replace(_BASE, memory_bytes_per_s=_BASE.memory_bytes_per_s / 2), host_bytes=_HOST_BYTES
    ),
    "memory*2+host": Device(
        replace(_BASE, memory_bytes_per_s=_BASE.memory_bytes_per_s * 2), host_bytes=_HOST_BYTES
    ),
    "A100+host": Device(GPUS["A100"], host_bytes=_HOST_BYTES),
    "L40S+host": Device(GPUS["L40S"], host_bytes=_HOST_BYTES),
    "70B on 4+host": Device(_BASE, "llama-3.1-70b", tp=4, host_bytes=4 * _HOST_BYTES),
    "A100": Device(GPUS["A100"]),
    "L40S": Device(GPUS["L40S"]),
    "70B on 4": Device(_BASE, "llama-3.1-70b", tp=4),
    "MoE on 8": Device(GPUS["H200"], "DeepSeek-V3", model_of(MOE), tp=8),
    "Mixtral on 2": Device(_BASE, "Mixtral-8x7B", model_of(MIXTRAL), tp=2),
    "Qwen3-30B": Device(_BASE, "Qwen3-30B-A3B", model_of(QWEN3_30B)),
    "gpt-oss-120b": Device(_BASE, "gpt-oss-120b", model_of(GPT_OSS)),
}


@dataclass(frozen=True, slots=True)
class Cell:
    traces: Path
    window: str
    """trace/targets/seed, or trace/targets/seed/seconds for a longer window or a shorter one"""
    device: str
    scheduler: str
    """As `sim.baselines.table.entry_of` names it; `:2` behind it: a fixed fleet with so many prefill instances."""

    @property
    def key(self) -> str:
        return f"{self.window}|{self.device}|{self.scheduler}"

    @property
    def named(self) -> tuple[str, str, int, float]:
        """(trace, targets, seed, seconds)."""
        trace, targets, seed, *seconds = self.window.split("/")
        return trace, targets, int(seed), float(seconds[0]) if seconds else WINDOW_S


def fleet_of(cell: Cell) -> Fleet:
    device = DEVICES[cell.device]
    name, _, prefills = cell.scheduler.partition(":")
    is_split = bool(prefills) or entry_of(name).kind == "static"
    num = int(prefills or NUM_GPUS // 2) if is_split else 0
    return Fleet(
        gpu=GPU,
        model=device.model,
        num_prefill=num,
        num_decode=NUM_GPUS - num if is_split else 0,
        num_both=0 if is_split else NUM_GPUS,
        tp=device.tp,
        changed=device.gpu,
        read=device.read,
        host_bytes=device.host_bytes,
    )


@cache
def offered(traces: Path, trace: str, seed: int, window_s: float = WINDOW_S) -> Window | SessionLoad:
    """Return a window or sessions; of `TRACE+tenants` each request's tenant is the trace's client. Raise ConfigError for a length
    that a trace's windows cannot have."""
    trace, _, tenants = trace.partition("+")
    if trace in TRACES:
        return replace(tuned_window(traces, trace, seed, window_s), named=bool(tenants))
    if window_s != WINDOW_S:
        raise ConfigError(f"a window of {trace!r} is {WINDOW_S:g} s long, not {window_s:g} s")
    if trace == "agents":
        return SessionLoad(sessions=read_sessions(traces / SESSIONS), start_within_s=60.0)
    rows = read_trace(traces / SYNTHETIC)
    start_s = (FIRST_WINDOW_S + seed * WINDOW_S * 7) % max(WINDOW_S, rows[-1].arrival_s - WINDOW_S)
    while sum(start_s <= row.arrival_s < start_s + WINDOW_S for row in rows) < LEAST_REQUESTS:
        start_s = (start_s + WINDOW_S) % rows[-1].arrival_s
    return Window(rows, start_s, WINDOW_S, natural_block_tokens(rows))


def run_cell(cell: Cell, target: float, max_steps: int) -> tuple[str, dict[str, Any]]:
    """Return its highest rate, in requests per second and instance. Its curve is a bound below the target: runs are cut."""
    trace, targets, seed, window_s = cell.named
    part, fleet = offered(cell.traces, trace, seed, window_s), fleet_of(cell)
    entry = entry_of(cell.scheduler.partition(":")[0])
    per_copy = part.rate / NUM_GPUS

    def measure(copies: float) -> float:
        return attained(part, copies, seed, TARGETS[targets], fleet=fleet, entry=entry, least=target)

    curve = Curve(measure)
    found = highest(curve, target, 10.0 / per_copy / _SLOW.get(trace, 1.0), max_steps=max_steps)
    rates = {f"{copies * per_copy:.4g}": round(share, 4) for copies, share in sorted(curve.points.items())}
    return cell.key, {"goodput": round(found * per_copy, 4), "curve": rates, "code": code()}


Bounds = dict[str, dict[str, float] | None]
"""By window and device what no scheduler can exceed: on the `window` itself, and in the `long run`, which a burst of 20 s with
long outputs can be above, since what is left after its last arrival is done later. It is 0 where none can hold the target, and
None for sessions."""


def bound_of(cell: Cell, target: float) -> dict[str, float] | None:
    trace, targets, seed, window_s = cell.named
    part = offered(cell.traces, trace, seed, window_s)
    if not isinstance(part, Window):
        return None
    limits, per_copy = Limits(part, TARGETS[targets], seed, fleet_of(cell)), part.rate / NUM_GPUS
    found = {"window": limits.ever(target), "long run": limits.sustained(target)}
    return {name: round(copies * per_copy, 4) for name, copies in found.items()}


@cache
def code() -> str:
    """Return a name of the code that decides what a cell says."""
    return hashlib.sha256(b"".join(file.read_bytes() for file in deciding_files())).hexdigest()[:8]


def deciding_files() -> list[Path]:
    """Return what is compiled, the simulation, and what the former and the coarse simulation import of the other rooms."""
    root = Path(__file__).parents[2]
    settings = tomllib.loads((root / "pyproject.toml").read_text())
    decides = {root / name for name in settings["tool"]["baton"]["compiled"]["modules"]}
    decides.update(root.glob("sim/coarse/*.py"))
    imported = (
        root / f"{node.module.replace('.', '/')}.py"
        for file in decides
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.ImportFrom) and node.module
    )
    return sorted({*decides, *root.glob("sim/**/*.py"), *(file for file in imported if file.exists())})


_SLOW = {"conversation": 6.0, "synthetic": 6.0}
"""About how many times as slowly as the others these are served, which says where searches begin."""


def ratios(cells: dict[str, Any]) -> dict[str, Any]:
    """Return our rate by each other's, on the windows, devices and splits that both were run on: mean, worst, and how many."""
    pairs: dict[str, dict[tuple[str, ...], float]] = {}
    for at, by_name in _rates(cells).items():
        others = {name: rate for name, rate in by_name.items() if name != OURS}
        if OURS in by_name and others:
            for name, rate in (*others.items(), (_BEST, max(others.values()))):
                pairs.setdefault(name, {})[at] = (by_name[OURS] + 1e-3) / (rate + 1e-3)
    return {name: _summary(found) for name, found in sorted(pairs.items())}


_BEST = "the best in each cell"
WANTED = 1.25
"""Times the best baseline's rate: the target."""


def by_bounds(cells: dict[str, Any], bounds: Bounds) -> dict[str, dict[str, Any]]:
    """Return, for each kind of bound, our rate and the best other's by it, in the mean of the windows and devices that have one
    and both were run on, and in how many of them it allows `WANTED` times the best other's."""
    return {kind: _by_bound(cells, bounds, kind) for kind in ("window", "long run")}


def _by_bound(cells: dict[str, Any], bounds: Bounds, kind: str) -> dict[str, Any]:
    shares: dict[str, tuple[float, float]] = {}
    for where, rates in _rates(cells).items():
        others = [rate for name, rate in rates.items() if name != OURS]
        known = bounds.get("|".join(where[:2]))
        if OURS in rates and others and known and (bound := known[kind]):
            shares["|".join(filter(None, where))] = (rates[OURS] + 1e-3) / bound, (max(others) + 1e-3) / bound
    ours, best = ([pair[i] for pair in shares.values()] for i in (0, 1))
    return {
        OURS: round(geometric_mean(ours), 3) if ours else 0.0,
        _BEST: round(geometric_mean(best), 3) if best else 0.0,
        "cells": len(shares),
        "cells_within_reach": sum(WANTED * share <= 1 for share in best),
        "out_of_reach": sorted(where for where, (_, share) in shares.items() if WANTED * share > 1),
    }


def _rates(cells: dict[str, Any]) -> dict[tuple[str, ...], dict[str, float]]:
    """Return the rates by (window, device, split) and scheduler."""
    rates: dict[tuple[str, ...], dict[str, float]] = {}
    for key, cell in cells.items():
        *where, scheduler = key.split("|")
        name, _, prefills = scheduler.partition(":")
        rates.setdefault((*where, prefills), {})[name] = cell["goodput"]
    return rates


def _summary(found: dict[tuple[str, ...], float]) -> dict[str, Any]:
    worst = min(found, key=lambda at: found[at])
    return {
        "mean": round(geometric_mean(found.values()), 3),
        "worst": round(found[worst], 3),
        "worst_at": "|".join(part for part in worst if part),
        "cells": len(found),
    }


def run(
    todo: Sequence[Cell], target: float, max_steps: int, processes: int
) -> Iterator[tuple[str, dict[str, Any]]]:
    measure = partial(run_cell, target=target, max_steps=max_steps)
    if processes == 1:
        yield from map(measure, todo)
        return
    with multiprocessing.get_context("spawn").Pool(processes) as pool:
        yield from pool.imap_unordered(measure, todo)


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
    until_s = time.monotonic() + args.hours * 3600
    found: dict[str, Any] = {"cells": {}, "bounds": {}}
    if args.json and args.json.exists():
        found |= json.loads(args.json.read_text())
    cells = found["cells"]
    all_cells = [
        Cell(args.traces, w, d, s) for d in args.devices for w in args.windows for s in args.schedulers
    ]
    find_bounds(args.traces, [*cells, *(cell.key for cell in all_cells)], found["bounds"], args.target)
    _write(args.json, args.target, args.steps, found)
    todo = [cell for cell in all_cells if _is_due(cells.get(cell.key), args.again)]
    for key, cell in track(run(todo, args.target, args.steps, args.processes), total=len(todo)):
        cells[key] = cell
        print(f"{cell['goodput']:8.2f}  {key}", flush=True)
        _write(args.json, args.target, args.steps, found)
        if time.monotonic() > until_s:
            break
    print(
        json.dumps({"ours_by_others": ratios(cells), "by_bound": by_bounds(cells, found["bounds"])}, indent=1)
    )


def find_bounds(traces: Path, keys: Sequence[str], bounds: Bounds, target: float) -> None:
    """Add the bounds that are missing for these cells."""
    for key in keys:
        window, device, scheduler = key.split("|")
        if f"{window}|{device}" not in bounds:
            bounds[f"{window}|{device}"] = bound_of(Cell(traces, window, device, scheduler), target)


def _is_due(known: dict[str, Any] | None, again: bool) -> bool:
    return known is None or (again and known.get("code") != code())


def _write(path: Path | None, target: float, max_steps: int, found: dict[str, Any]) -> None:
    command = (
        f"benchmarks.goodput.goodput_wide --traces ../shared/traces --target {target:g} --steps {max_steps}"
    )
    cells, bounds = found["cells"], found["bounds"]
    content = {
        "ours_by_others": ratios(cells),
        "by_bound": by_bounds(cells, bounds),
        "bounds": dict(sorted(bounds.items())),
        "cells": dict(sorted(cells.items())),
    }
    write(path, command, content)


if __name__ == "__main__":
    main()
