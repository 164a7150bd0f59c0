"""One run of the ablation: a load under the full law, or with one rule off or one constant halved or doubled."""

import ast
import hashlib
import time
from base64 import b64decode, b64encode
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, Final

from benchmarks.goodput.ablation_loads import AblationLoad
from benchmarks.goodput.rules import RULES
from benchmarks.goodput.search import code, highest
from core.scheduler_tuning import DEFAULT_TUNING, SchedulerTuning
from sim.baselines.table import Entry
from sim.coarse.simulated_sequence import SimulatedRequest
from sim.coarse.world import CoarseConfig, CoarseOutcome
from sim.goodput import serve, tuned
from sim.outcome_report import served_job

FULL: Final = "full"
KNEE, KNEE_PRECISION, KNEE_STEPS = 0.9, 1.06, 6
"""A load's rate is the highest at which the full law has this share of the requests in time, as found in so many steps."""


@dataclass(frozen=True, slots=True)
class Constant:
    """A number of `SchedulerTuning`."""

    name: str
    unit: str
    least: float
    most: float
    why: str
    value: float | int

    @property
    def others(self) -> dict[str, float | int]:
        """Half and double the value, within its range; without what the range leaves of neither."""
        kind = type(self.value)
        found = {
            "half": kind(max(self.least, self.value / 2)),
            "double": kind(min(self.most, self.value * 2)),
        }
        return {name: value for name, value in found.items() if value != self.value}


@cache
def constants() -> tuple[Constant, ...]:
    """Return the constants, with unit, range and reason as the docstrings behind them say. Raises ValueError for another form."""
    source = Path(__file__).parents[2] / "core" / "scheduler_tuning.py"
    [made] = [node for node in ast.parse(source.read_text()).body if isinstance(node, ast.ClassDef)]
    found: list[Constant] = []
    for node, text in zip(made.body[::2], made.body[1::2], strict=True):
        match node, text:
            case (
                ast.AnnAssign(target=ast.Name(name), annotation=ast.Name("float" | "int")),
                ast.Expr(ast.Constant(str(words))),
            ):
                head, _, why = words.partition(": ")
                unit, _, bounds = head.rpartition(", ")
                least, most = map(float, bounds.split(" to "))
                found.append(Constant(name, unit, least, most, why, getattr(DEFAULT_TUNING, name)))
            case _:
                pass
    return tuple(found)


def variants() -> dict[str, dict[str, float | bool]]:
    """Return what each variant changes, by name: the full law, each rule off, each constant halved and doubled."""
    found: dict[str, dict[str, float | bool]] = {FULL: {}}
    found |= {f"without {rule.name}": dict(rule.off) for rule in RULES}
    for constant in constants():
        found |= {
            f"{name} {constant.name}": {constant.name: value} for name, value in constant.others.items()
        }
    return found


def tuning_of(changed: Mapping[str, float | bool]) -> SchedulerTuning:
    own = {name: value for name, value in changed.items() if "." not in name}
    return replace(DEFAULT_TUNING, **own)  # type: ignore[arg-type]


def change_of(changed: Mapping[str, float | bool]) -> Callable[[CoarseConfig], CoarseConfig]:
    def change(config: CoarseConfig) -> CoarseConfig:
        of = {
            scope: {
                name.partition(".")[2]: value for name, value in changed.items() if name.startswith(scope)
            }
            for scope in ("schedule.", "sim.")
        }
        schedule = config.schedule.model_copy(update=of["schedule."])
        return replace(config, tuning=tuning_of(changed), schedule=schedule, **of["sim."])  # type: ignore[arg-type]

    return change


@dataclass(frozen=True, slots=True)
class Task:
    """`baseline` has for each group which requests the full law had in time; None: this is the full law's run."""

    traces: Path
    load: AblationLoad
    rate: float
    variant: str
    arrivals: int
    baseline: dict[str, str] | None


def run(task: Task) -> dict[str, Any]:
    """Return the row of one run. Of the full law it has who was in time; else how many that changed, group by group."""
    began_s = time.process_time()
    changed = variants()[task.variant]
    work, outcome = _serve(task.traces, task.load, task.rate, task.arrivals, changed)
    made: dict[str, Any] = {
        "load": task.load.name,
        "variant": task.variant,
        "arrivals": task.arrivals,
        "changed": {name: str(value) for name, value in changed.items()},
        "code": code(),
        "decisions": hashlib.sha256("\n".join(outcome.decisions).encode()).hexdigest()[:12],
    }
    held = {name: [served_job(job).holds(job.request.slo) for job in jobs] for name, jobs in work.items()}
    before = task.baseline or {}
    made["groups"] = {name: _group(of, before.get(name)) for name, of in held.items()}
    if task.baseline is None:
        made["in_time"] = {name: packed(of) for name, of in held.items()}
    made["cpu_s"] = round(time.process_time() - began_s, 2)
    return made


def _group(held: Sequence[bool], baseline: str | None) -> dict[str, int]:
    found = {"requests": len(held), "in_time": sum(held)}
    if baseline is not None:
        before = [*unpacked(baseline, len(held))]
        found["gained"] = sum(now and not then for now, then in zip(held, before, strict=True))
        found["lost"] = sum(then and not now for now, then in zip(held, before, strict=True))
    return found


def packed(held: Sequence[bool]) -> str:
    bits = sum(1 << index for index, one in enumerate(held) if one)
    return b64encode(bits.to_bytes(len(held) // 8 + 1, "little")).decode()


def unpacked(text: str, count: int) -> Iterator[bool]:
    bits = int.from_bytes(b64decode(text), "little")
    return (bool(bits >> index & 1) for index in range(count))


def find_knee(traces: Path, load: AblationLoad) -> dict[str, float]:
    """Return the rate near which the load is run, by a search with the full law on one set of arrivals, and the share there.
    Where no rate has enough in time the guess is taken."""
    shares: dict[float, float] = {}

    def measure(rate: float) -> float:
        jobs = _serve(traces, load, rate, 0, {})[0]["all"]
        shares[rate] = sum(served_job(job).holds(job.request.slo) for job in jobs) / len(jobs)
        return shares[rate]

    rate = highest(measure, KNEE, load.guess, KNEE_PRECISION, KNEE_STEPS) or load.guess
    return {"rate": round(rate, 4), "share": round(shares[rate], 4)}


def _serve(
    traces: Path, load: AblationLoad, rate: float, arrivals: int, changed: Mapping[str, float | bool]
) -> tuple[dict[str, list[SimulatedRequest]], CoarseOutcome]:
    """Return (the requests that count, by group, as they were served; what happened)."""
    cell = load.cell(traces)
    work = load.work(cell, rate, arrivals)
    top = max(job.request.slo.priority for job in work)
    high = {job.request.id for job in work if job.request.slo.priority == top}
    tenants = [name for name, _ in Counter(job.request.tenant for job in work).most_common()]
    light = {*tenants[len(tenants) // 2 :]} if len(tenants) > 1 else set[str]()
    entry = Entry(tuned(tuning_of(changed)), cell.entry.kind, paced=True)
    outcome = serve(work, cell.part.block_tokens, fleet=cell.fleet, entry=entry, change=change_of(changed))
    counted = load.counted(work)
    groups = {
        "all": counted,
        "class": [job for job in counted if job.request.id in high] if len(high) < len(work) else [],
        "light": [job for job in counted if job.request.tenant in light],
    }
    return {name: jobs for name, jobs in groups.items() if jobs}, outcome
