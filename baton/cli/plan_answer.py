"""Searches what `baton plan` was asked for, shows fleets as they are tried, and says which one is the cheapest."""

import json
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.live import Live
from rich.table import Table

from baton.bench.traces import read_trace
from baton.plan_report import PlanFinding, as_json
from core.errors import ConfigError
from core.types import Slo
from sim.agent_sessions import SessionLoad, is_session_trace, read_sessions
from sim.catalogue.catalogue import GPUS
from sim.catalogue.model_config import named_model
from sim.planning.plan_demand import session_demand, trace_demand
from sim.planning.plan_effort import Effort
from sim.planning.plan_fleets import Hardware
from sim.planning.plan_trial import Trial
from sim.planning.planner import Demand, Targets, by_price, plan

_ROWS = 18
_SESSIONS_START_WITHIN_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanQuestion:
    """What the options of `baton plan` say."""

    trace: Path
    model: str
    adapter_bytes: float
    """What adapters take in each instance."""
    gpus: list[str]
    prices: str
    """Dollars an hour by GPU, as H100=2.10,L40S=0.80."""
    start_at: float | None
    """The beginning of the window; None: the busiest one."""
    window_s: float
    """0: some hundred requests."""
    copies: float
    ttft_s: float
    tpot_s: float
    attainment: float
    max_instances: int
    effort: float
    """As `sim.planning.plan_effort` has it."""


def answer(question: PlanQuestion, output: Path | None, picture: Path | None) -> None:
    """Print the fleets that were tried and the finding, and write it to `output` and `picture`. Raises ConfigError, also where no
    fleet would do."""
    began_at = time.perf_counter()
    wanted = question.attainment
    demand = _demand(question)
    Console(stderr=True).print(_what_is_looked_at(demand), highlight=False)
    with _partial_table(wanted) as show:
        found = PlanFinding(demand, plan(demand, show, Effort(question.effort)))
    Console().print(_table(found.plan.trials, found.plan.best, wanted))
    if found.plan.best is not None:
        Console().print(found.sentence, style="bold")
    if found.plan.num_left:
        more = f"--effort {2 * question.effort:g} looks further, --effort 0 to the end"
        Console(stderr=True).print(more, highlight=False)
    if output is not None:
        took = {"wall_s": time.perf_counter() - began_at}
        output.write_text(json.dumps(as_json(found) | took, indent=1) + "\n")
    if picture is not None:
        from baton.plan_picture import draw_plan  # noqa: PLC0415 (matplotlib takes seconds to import)

        draw_plan(found.plan.trials, found.plan.best, wanted, found.sentence, picture)
    if found.plan.best is None:
        raise ConfigError(found.sentence)


def _demand(question: PlanQuestion) -> Demand:
    if not set(question.gpus) <= set(GPUS):
        raise ConfigError(f"unknown GPU: {','.join(question.gpus)}; known: {', '.join(GPUS)}")
    model = named_model(question.model, question.adapter_bytes)
    hardware = Hardware(model=question.model, gpus=question.gpus, prices=_prices(question.prices), read=model)
    targets = Targets(
        slo=Slo(name="planned", ttft_s=question.ttft_s, tpot_s=question.tpot_s, hopeless="refuse"),
        attainment=question.attainment,
        copies=question.copies,
        max_instances=question.max_instances,
    )
    trace = question.trace
    if is_session_trace(trace):
        within_s = question.window_s or _SESSIONS_START_WITHIN_S
        return session_demand(
            SessionLoad(sessions=read_sessions(trace), start_within_s=within_s), hardware, targets
        )
    return trace_demand(read_trace(trace), hardware, targets, question.start_at, question.window_s)


def _what_is_looked_at(demand: Demand) -> str:
    first = demand.loads[0]
    where = ", ".join(f"{load.start_at:.0f} s ({load.why})" for load in demand.loads)
    return f"{len(demand.whole)} requests in {demand.whole.span_s:.0f} s; looks at {first.duration_s:.0f} s from {where}"


def _prices(text: str) -> dict[str, float]:
    """Parse a price list. Raises ConfigError."""
    prices: dict[str, float] = {}
    for item in filter(None, (part.strip() for part in text.split(","))):
        gpu, _, dollars = item.partition("=")
        try:
            prices[gpu] = float(dollars)
        except ValueError:
            raise ConfigError(f"--prices {item}: say dollars an hour, as H100=2.10") from None
        if gpu not in GPUS or prices[gpu] <= 0:
            raise ConfigError(f"--prices {item}: known GPUs are {', '.join(GPUS)}, and none is free")
    return prices


@contextmanager
def _partial_table(wanted: float) -> Generator[Callable[[Trial], None]]:
    """Show what was tried as it goes: a table that grows on a terminal, lines elsewhere."""
    console, trials = Console(stderr=True), list[Trial]()
    if not console.is_terminal:
        yield lambda trial: console.print(f"{trial.name}: ${trial.dollars_per_h:.2f}/h, {trial.attained:.1%}")
        return
    with Live(console=console, transient=True) as live:

        def show(trial: Trial) -> None:
            trials.append(trial)
            live.update(_table(trials, by_price(trials, wanted), wanted))

        yield show


def _table(trials: Sequence[Trial], best: Trial | None, wanted: float) -> Table:
    """Return a table of the trials, the cheapest first. The dearest failures are the nearest: of many the last are shown."""
    table = Table("fleet", "$/h", f"attainment (of {wanted:.0%})", "limited by", "busy")
    for trial in sorted(trials, key=lambda t: (t.dollars_per_h, -t.attained))[-_ROWS:]:
        held = trial.attained >= wanted
        table.add_row(
            trial.name,
            f"{trial.dollars_per_h:.2f}",
            f"{trial.attained:.1%}" if held else f"under {wanted:.0%} (at most {trial.attained:.1%})",
            trial.limit,
            f"{trial.busy_share:.0%}",
            style="bold green" if trial is best else "",
        )
    return table
