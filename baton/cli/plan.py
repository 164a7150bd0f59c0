"""`baton plan`: the cheapest fleet that holds the targets on a trace, its headroom, what limits the others, a picture, JSON."""

import json
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.live import Live
from rich.table import Table

from baton.bench.traces import read_trace
from baton.plan_report import PlanFinding, as_json
from core.errors import ConfigError
from core.types import Slo
from sim.agent_sessions import SessionLoad, is_session_trace, read_sessions
from sim.catalogue import GPUS, MODELS
from sim.model_config import named_model
from sim.plan_demand import session_demand, trace_demand
from sim.plan_fleets import Hardware
from sim.plan_trial import Trial
from sim.planner import Targets, by_price
from sim.planner import plan as find_plan

_ROWS = 18


def plan(
    trace: Annotated[
        Path, typer.Option(help="Trace file: Mooncake, ShareGPT, Azure, ServeGen or sessions; .gz too.")
    ],
    model: Annotated[
        str, typer.Option(help=f"One of {', '.join(MODELS)}, or any model's config.json.")
    ] = "llama-3.1-8b",
    gpus: Annotated[str, typer.Option(help="Which to consider, by commas.")] = ",".join(GPUS),
    prices: Annotated[
        str, typer.Option(help="Dollars an hour in place of the catalogue's, as H100=2.10,L40S=0.80.")
    ] = "",
    start: Annotated[
        float, typer.Option(help="Plan for the window that begins at this second, not for the busiest.")
    ] = -1.0,
    seconds: Annotated[
        float,
        typer.Option(
            min=0, help="Length of a window, 0: some hundred requests; sessions begin within so long."
        ),
    ] = 0.0,
    copies: Annotated[float, typer.Option(min=0.01, help="Superposed copies; 2.5 is two and a half.")] = 1.0,
    ttft_ms: Annotated[float, typer.Option(min=0, help="Target for the first token.")] = 2000.0,
    tpot_ms: Annotated[float, typer.Option(min=0, help="Target for the mean gap after it.")] = 100.0,
    attainment: Annotated[float, typer.Option(min=0, max=1, help="Share that must hold both.")] = 0.99,
    max_instances: Annotated[int, typer.Option(min=1, help="Of a fleet.")] = 64,
    within_s: Annotated[
        float,
        typer.Option(min=0, help="Answer after so many seconds with the best so far; 0: search to the end."),
    ] = 7.0,
    output: Annotated[Path | None, typer.Option("--json", help="Write everything here.")] = None,
    picture: Annotated[Path | None, typer.Option(help="Attainment over price, as PNG or SVG.")] = None,
) -> None:
    """Find the cheapest GPUs, group size, number of instances and roles for a trace and its targets."""
    began_s = time.perf_counter()

    def time_left() -> float:
        return 1 - (time.perf_counter() - began_s) / within_s if within_s else 1.0

    chosen = gpus.split(",")
    if not set(chosen) <= set(GPUS):
        raise ConfigError(f"unknown GPU: {gpus}; known: {', '.join(GPUS)}")
    hardware = Hardware(model=model, gpus=chosen, prices=_prices(prices), read=named_model(model))
    targets = Targets(
        slo=Slo(name="planned", ttft_s=ttft_ms / 1e3, tpot_s=tpot_ms / 1e3),
        attainment=attainment,
        copies=copies,
        max_instances=max_instances,
    )
    if is_session_trace(trace):
        load = SessionLoad(sessions=read_sessions(trace), start_within_s=seconds or 60.0)
        demand = session_demand(load, hardware, targets)
    else:
        demand = trace_demand(read_trace(trace), hardware, targets, start if start >= 0 else None, seconds)
    with _partial_table(attainment) as show:
        found = PlanFinding(demand, find_plan(demand, show, time_left))
    Console().print(_table(found.plan.trials, found.plan.best, attainment))
    Console().print(found.sentence, style="bold")
    if output is not None:
        took = {"wall_s": time.perf_counter() - began_s}
        output.write_text(json.dumps(as_json(found) | took, indent=1) + "\n")
    if picture is not None:
        from baton.plan_picture import draw_plan  # noqa: PLC0415 (seconds, which --help does not need)

        draw_plan(found.plan.trials, found.plan.best, attainment, found.sentence, picture)
    if found.plan.best is None:
        raise ConfigError(found.sentence)


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
