"""`baton simulate`: a trace through the production scheduler on modelled GPUs, under virtual time."""

import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from baton.bench.traces import TraceRow, read_trace
from core.errors import ConfigError
from core.step_profile import read_profile
from core.types import Slo
from sim.catalogue import GPUS, MODELS
from sim.catalogued import Fleet, coarse_config, full_config
from sim.coarse.coarse_workload import Load, jobs, natural_block_tokens
from sim.coarse.world import simulate as run_coarse
from sim.model_config import named_model
from sim.outcome_report import ServedRequest, figures, served_coarsely, served_in_full
from sim.simulated_cluster import simulate as run_full
from sim.trace_workload import arrivals
from sim.virtual_loop import run_virtual


@dataclass(frozen=True, slots=True, kw_only=True)
class _Study:
    """What all runs of one call have in common."""

    rows: list[TraceRow]
    fleet: Fleet
    slo: Slo
    seconds: float
    seed: int
    coarse: bool

    def run(self, copies: int) -> tuple[list[ServedRequest], dict[str, Any]]:
        """Return what became of the requests, and figures about the run itself."""
        began = time.perf_counter()
        served, more = self._coarsely(copies) if self.coarse else self._in_full(copies)
        wall_s = time.perf_counter() - began
        return served, more | {"wall_s": wall_s, "requests_per_wall_s": len(served) / wall_s}

    def _in_full(self, copies: int) -> tuple[list[ServedRequest], dict[str, Any]]:
        work = arrivals(self.rows, self.seconds, copies, self.seed)
        with Progress(console=Console(stderr=True), transient=True) as bar:
            task = bar.add_task("requests", total=len(work))
            config = full_config(self.fleet, self.slo)
            outcome = run_virtual(run_full(config, work, finished=lambda: bar.advance(task)))
        return served_in_full(work, outcome), {}

    def _coarsely(self, copies: int) -> tuple[list[ServedRequest], dict[str, Any]]:
        block_tokens = natural_block_tokens(self.rows)
        work = jobs(
            Load(rows=self.rows, duration_s=self.seconds, copies=copies, seed=self.seed),
            self.slo,
            block_tokens,
        )
        with Progress(console=Console(stderr=True), transient=True) as bar:
            task = bar.add_task("arrivals", total=len(work))
            config = coarse_config(self.fleet, block_tokens)
            outcome = run_coarse(config, work, advanced=lambda count: bar.update(task, completed=count))
        return served_coarsely(outcome), {
            "num_events": outcome.num_events,
            "num_steps": outcome.num_steps,
            "busy_share": outcome.busy_share,
            "block_tokens": block_tokens,
        }


def simulate(
    trace: Annotated[Path, typer.Option(help="Trace file: Mooncake, ShareGPT, Azure or ServeGen; .gz too.")],
    gpu: Annotated[str, typer.Option(help=f"One of {', '.join(GPUS)}.")] = "H100",
    model: Annotated[
        str, typer.Option(help=f"One of {', '.join(MODELS)}, or any model's config.json.")
    ] = "llama-3.1-8b",
    prefill: Annotated[int, typer.Option(min=0, help="Prefill instances.")] = 1,
    decode: Annotated[int, typer.Option(min=0, help="Decode instances.")] = 1,
    both: Annotated[int, typer.Option(min=0, help="Instances that do either role.")] = 0,
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
    report: Annotated[
        Path | None,
        typer.Option(help="Folder for pictures: requests over time, attainment, goodput over rate."),
    ] = None,
    sweep: Annotated[
        str, typer.Option(help="Numbers of copies by commas, for the report's goodput over rate.")
    ] = "",
) -> None:
    """Serve a trace on a modelled cluster and report latencies and SLO attainment."""
    numbers = _numbers(sweep)
    if decode + both < 1:
        raise ConfigError("no instance decodes: give --decode or --both at least one")
    if numbers and report is None:
        raise ConfigError("--sweep draws goodput over rate: give --report a folder")
    fleet = Fleet(
        gpu=gpu,
        model=model,
        num_prefill=prefill,
        num_decode=decode,
        num_both=both,
        profile=read_profile(profile) if profile else None,
        read=named_model(model),
    )
    slo = Slo(name="simulated", ttft_s=ttft_ms / 1e3, tpot_s=tpot_ms / 1e3)
    study = _Study(
        rows=read_trace(trace, seed), fleet=fleet, slo=slo, seconds=seconds, seed=seed, coarse=coarse
    )
    served, more = study.run(copies)
    result = figures(served, slo) | more
    _print(result)
    if output is not None:
        output.write_text(json.dumps(result, indent=2) + "\n")
    if report is not None:
        _report(study, served, numbers, report)


def _numbers(sweep: str) -> list[int]:
    """Parse numbers. Raises ConfigError."""
    try:
        numbers = [int(part) for part in sweep.split(",") if part.strip()]
    except ValueError:
        numbers = [0]
    if any(number < 1 for number in numbers):
        raise ConfigError(f"--sweep {sweep}: whole numbers of copies by commas, from 1 on")
    return numbers


def _report(study: _Study, served: list[ServedRequest], sweep: list[int], folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    from baton.simulation_pictures import draw_attainment, draw_goodput, draw_timeline  # noqa: PLC0415 (seconds, which --help does not need)

    draw_timeline(served, folder / "timeline.png")
    draw_attainment(served, study.slo, folder / "attainment.png")
    if sweep:
        runs = [study.run(copies)[0] for copies in sweep]
        draw_goodput({len(run) / study.seconds: run for run in runs}, study.slo, folder / "goodput.png")
    Console().print(f"pictures in {folder}")


def _print(result: dict[str, Any]) -> None:
    table = Table("figure", "value")
    for name, value in result.items():
        text = (
            ", ".join(f"{k} {v:.1f}" for k, v in value.items()) if isinstance(value, dict) else f"{value:.4g}"
        )
        table.add_row(name, text)
    Console().print(table)
