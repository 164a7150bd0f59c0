"""`baton simulate`: a trace through the production scheduler on modelled GPUs, under virtual time."""

import json
import time
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from baton.bench.traces import TraceRow, read_trace
from core.step_profile import read_profile
from core.types import Slo
from sim.catalogue import GPUS, MODELS
from sim.catalogued import Fleet, coarse_config, full_config
from sim.coarse.workload import Load, jobs, natural_block_tokens
from sim.coarse.world import simulate as run_coarse
from sim.loop import run_virtual
from sim.report import Served, figures, served_coarsely, served_in_full
from sim.run import simulate as run_full
from sim.workload import arrivals


def simulate(
    trace: Annotated[Path, typer.Option(help="Trace file: Mooncake, ShareGPT, Azure or ServeGen; .gz too.")],
    gpu: Annotated[str, typer.Option(help=f"One of {', '.join(GPUS)}.")] = "H100",
    model: Annotated[str, typer.Option(help=f"One of {', '.join(MODELS)}.")] = "llama-3.1-8b",
    prefill: Annotated[int, typer.Option(min=0, help="Prefill instances.")] = 1,
    decode: Annotated[int, typer.Option(min=1, help="Decode instances.")] = 1,
    seconds: Annotated[float, typer.Option(min=1, help="How much of the trace.")] = 60.0,
    copies: Annotated[int, typer.Option(min=1, help="Superposed copies, each with prefixes of its own.")] = 1,
    ttft_ms: Annotated[float, typer.Option(min=0, help="Target for the first token.")] = 2000.0,
    tpot_ms: Annotated[float, typer.Option(min=0, help="Target for the mean gap after it.")] = 100.0,
    coarse: Annotated[
        bool,
        typer.Option(
            "--coarse", help="Two orders quicker: production scheduler and blocks, modelled workers."
        ),
    ] = False,
    profile: Annotated[
        Path | None, typer.Option(help="What `baton profile` has measured, in place of --gpu and --model.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of arrivals and tokens.")] = 0,
    output: Annotated[Path | None, typer.Option("--json", help="Write the figures here.")] = None,
) -> None:
    """Serve a trace on a modelled cluster and report latencies and SLO attainment."""
    fleet = Fleet(gpu, model, prefill, decode, profile=read_profile(profile) if profile else None)
    slo = Slo("simulated", ttft_ms / 1e3, tpot_ms / 1e3)
    rows = read_trace(trace, seed)
    began = time.perf_counter()
    serve = _serve_coarsely if coarse else _serve_in_full
    served, more = serve(rows, fleet, slo, (seconds, copies, seed))
    wall_s = time.perf_counter() - began
    result = figures(served, slo) | more | {"wall_s": wall_s, "requests_per_wall_s": len(served) / wall_s}
    _print(result)
    if output is not None:
        output.write_text(json.dumps(result, indent=2) + "\n")


def _serve_in_full(
    rows: list[TraceRow], fleet: Fleet, slo: Slo, size: tuple[float, int, int]
) -> tuple[list[Served], dict[str, Any]]:
    seconds, copies, seed = size
    work = arrivals(rows, seconds, copies, seed)
    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("requests", total=len(work))
        outcome = run_virtual(run_full(full_config(fleet, slo), work, finished=lambda: bar.advance(task)))
    return served_in_full(work, outcome), {}


def _serve_coarsely(
    rows: list[TraceRow], fleet: Fleet, slo: Slo, size: tuple[float, int, int]
) -> tuple[list[Served], dict[str, Any]]:
    seconds, copies, seed = size
    block_tokens = natural_block_tokens(rows)
    work = jobs(Load(rows, seconds, copies, seed=seed), slo, block_tokens)
    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("arrivals", total=len(work))
        outcome = run_coarse(
            coarse_config(fleet, block_tokens), work, advanced=lambda count: bar.update(task, completed=count)
        )
    more = {
        "num_events": outcome.num_events,
        "num_steps": outcome.num_steps,
        "busy_share": outcome.busy_share,
        "block_tokens": block_tokens,
    }
    return served_coarsely(outcome), more


def _print(result: dict[str, Any]) -> None:
    table = Table("figure", "value")
    for name, value in result.items():
        text = (
            ", ".join(f"{k} {v:.1f}" for k, v in value.items()) if isinstance(value, dict) else f"{value:.4g}"
        )
        table.add_row(name, text)
    Console().print(table)
