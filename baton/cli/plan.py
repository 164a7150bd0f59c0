"""`baton plan`: the cheapest fleet that holds the targets on a trace, what limits the others, a table, a picture, JSON."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from baton.bench.traces import read_trace
from core.errors import ConfigError
from core.types import Slo
from sim.catalogue import GPUS, MODELS
from sim.coarse.coarse_workload import natural_block_tokens
from sim.goodput import Window
from sim.model_config import named_model
from sim.planner import Demand, Trial, cheapest
from sim.planner import plan as find_plan


def plan(
    trace: Annotated[Path, typer.Option(help="Trace file: Mooncake, ShareGPT, Azure or ServeGen; .gz too.")],
    model: Annotated[
        str, typer.Option(help=f"One of {', '.join(MODELS)}, or any model's config.json.")
    ] = "llama-3.1-8b",
    gpus: Annotated[str, typer.Option(help="Which to consider, by commas.")] = ",".join(GPUS),
    seconds: Annotated[float, typer.Option(min=1, help="How much of the trace.")] = 60.0,
    start: Annotated[float, typer.Option(min=0, help="From which second on.")] = 0.0,
    copies: Annotated[float, typer.Option(min=0.01, help="Superposed copies; 2.5 is two and a half.")] = 1.0,
    ttft_ms: Annotated[float, typer.Option(min=0, help="Target for the first token.")] = 2000.0,
    tpot_ms: Annotated[float, typer.Option(min=0, help="Target for the mean gap after it.")] = 100.0,
    attainment: Annotated[float, typer.Option(min=0, max=1, help="Share that must hold both.")] = 0.99,
    seeds: Annotated[int, typer.Option(min=1, help="Draws of the arrivals; the error bars.")] = 3,
    max_instances: Annotated[int, typer.Option(min=1, help="Of any one kind.")] = 64,
    output: Annotated[Path | None, typer.Option("--json", help="Write all trials here.")] = None,
    picture: Annotated[
        Path | None, typer.Option("--plot", help="Attainment over price, as PNG or SVG.")
    ] = None,
) -> None:
    """Find the cheapest GPUs, group size, number of instances and roles for a trace and its targets."""
    chosen = gpus.split(",")
    if not set(chosen) <= set(GPUS):
        raise ConfigError(f"unknown GPU: {gpus}; known: {', '.join(GPUS)}")
    rows = read_trace(trace)
    window = Window(rows, start, seconds, natural_block_tokens(rows))
    slo = Slo(name="planned", ttft_s=ttft_ms / 1e3, tpot_s=tpot_ms / 1e3)
    demand = Demand(
        model=model,
        window=window,
        slo=slo,
        attainment=attainment,
        seeds=range(seeds),
        copies=copies,
        gpus=chosen,
        max_instances=max_instances,
        read=named_model(model),
    )
    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("fleets", total=None)
        trials = find_plan(demand, lambda trial: bar.update(task, advance=1, description=_name(trial)))
    best = cheapest(trials, attainment)
    _print(trials, best, attainment)
    if output is not None:
        output.write_text(
            json.dumps({"best": best and _plain(best), "trials": [_plain(t) for t in trials]}, indent=1)
            + "\n"
        )
    if picture is not None:
        from baton.plan_picture import draw_plan  # noqa: PLC0415 (seconds, which --help does not need)

        draw_plan(trials, best, attainment, picture, _name)
    if best is None:
        raise ConfigError(
            f"no fleet of up to {max_instances} instances holds the targets for {attainment:.0%} of the requests"
        )


def _name(trial: Trial) -> str:
    fleet = trial.fleet
    sizes = [f"{name}{size}" for name, size in (("tp", fleet.tp), ("pp", fleet.pp)) if size > 1]
    group = " ".join([fleet.gpu, *sizes])
    roles = (
        f"{fleet.num_both} any role"
        if fleet.num_both
        else f"{fleet.num_prefill} prefill, {fleet.num_decode} decode"
    )
    return f"{group}: {roles}"


def _plain(trial: Trial) -> dict[str, Any]:
    return asdict(trial) | {
        "name": _name(trial),
        "dollars_per_h": trial.fleet.dollars_per_h,
        "mean": trial.mean,
        "limit": trial.limit,
    }


def _print(trials: list[Trial], best: Trial | None, wanted: float) -> None:
    """Print the trials. The dearest failures are the nearest, so each GPU and group size shows its last few."""
    table = Table("fleet", "$/h", f"attainment (of {wanted:.0%})", "over the seeds", "limited by", "busy")
    for trial in sorted(trials, key=lambda t: (t.fleet.dollars_per_h, -t.mean)):
        low, high = min(trial.attainments), max(trial.attainments)
        table.add_row(
            _name(trial),
            f"{trial.fleet.dollars_per_h:.2f}",
            f"{trial.mean:.1%}",
            f"{low:.1%} to {high:.1%}",
            trial.limit,
            f"{trial.busy_share:.0%}",
            style="bold green" if trial is best else "",
        )
    Console().print(table)
