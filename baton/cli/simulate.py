"""`baton simulate`: a trace through the production scheduler on modelled GPUs, under virtual time."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from baton.bench.traces import read_trace
from baton.cli.yaml_file import read_yaml
from baton.simulation import Study, TraceWorkload, Workload
from core.config import load
from core.errors import ConfigError
from core.step_profile import read_profile
from core.types import Slo
from sim.agent_sessions import SessionLoad, is_session_trace, read_sessions
from sim.catalogue import GPUS, MODELS
from sim.catalogued import Fleet
from sim.fleet_changes import read_failure
from sim.model_config import named_model
from sim.outcome_report import ServedRequest, by_tenant, figures

_SHOWN_TENANTS = 12


def simulate(
    trace: Annotated[
        Path, typer.Option(help="Trace file: Mooncake, ShareGPT, Azure, ServeGen or sessions; .gz too.")
    ],
    gpu: Annotated[str, typer.Option(help=f"One of {', '.join(GPUS)}.")] = "H100",
    model: Annotated[
        str, typer.Option(help=f"One of {', '.join(MODELS)}, or any model's config.json.")
    ] = "llama-3.1-8b",
    prefill: Annotated[int, typer.Option(min=0, help="Prefill instances.")] = 1,
    decode: Annotated[int, typer.Option(min=0, help="Decode instances.")] = 1,
    both: Annotated[int, typer.Option(min=0, help="Instances that do either role.")] = 0,
    seconds: Annotated[
        float, typer.Option(min=1, help="How much of the trace; sessions begin within so long.")
    ] = 60.0,
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
    config: Annotated[
        Path | None,
        typer.Option(help="A configuration whose tenants, slo_classes, schedule and scaling count."),
    ] = None,
    fail: Annotated[
        list[str] | None,
        typer.Option(
            help="An instance that is lost, as decode-1@120 (seconds), or back as decode-1@120-180."
        ),
    ] = None,
    autoscale: Annotated[
        bool, typer.Option("--autoscale", help="Pools follow their load, by the configuration's `scaling`.")
    ] = False,
    cold_start_s: Annotated[
        float, typer.Option(min=0, help="How long a new instance takes to serve, with --autoscale.")
    ] = 60.0,
    seed: Annotated[int, typer.Option(help="Seed of arrivals and tokens.")] = 0,
    output: Annotated[Path | None, typer.Option("--json", help="Write the figures here.")] = None,
    report: Annotated[
        Path | None,
        typer.Option(help="Folder for pictures: requests over time, attainment, goodput over rate."),
    ] = None,
    sweep: Annotated[
        str,
        typer.Option(
            help="Numbers of copies by commas, for the report's goodput over rate; with --coarse also more, until it breaks."
        ),
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
    study = Study(
        workload=_workload(trace, seconds, seed),
        fleet=fleet,
        slo=Slo(name="simulated", ttft_s=ttft_ms / 1e3, tpot_s=tpot_ms / 1e3),
        seconds=seconds,
        seed=seed,
        coarse=coarse,
        config=load(read_yaml(config), {}, {}),
        failures=[read_failure(text) for text in fail or ()],
        cold_start_s=cold_start_s if autoscale else None,
    )
    served, more = study.run(copies)
    tenants = by_tenant(served, study.slo)
    result = figures(served, study.slo) | more | ({"tenants": tenants} if len(tenants) > 1 else {})
    _print(result)
    if output is not None:
        output.write_text(json.dumps(result, indent=2) + "\n")
    if report is not None:
        _report(study, served, numbers, report)


def _workload(trace: Path, seconds: float, seed: int) -> Workload:
    if is_session_trace(trace):
        return SessionLoad(sessions=read_sessions(trace), start_within_s=seconds)
    return TraceWorkload(read_trace(trace, seed), seconds)


def _numbers(sweep: str) -> list[int]:
    """Parse numbers. Raises ConfigError."""
    try:
        numbers = [int(part) for part in sweep.split(",") if part.strip()]
    except ValueError:
        numbers = [0]
    if any(number < 1 for number in numbers):
        raise ConfigError(f"--sweep {sweep}: whole numbers of copies by commas, from 1 on")
    return numbers


def _report(study: Study, served: list[ServedRequest], sweep: list[int], folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    from baton.simulation_pictures import draw_attainment, draw_goodput, draw_timeline  # noqa: PLC0415 (seconds, which --help does not need)

    draw_timeline(served, folder / "timeline.png")
    draw_attainment(served, study.slo, folder / "attainment.png")
    if sweep:
        draw_goodput(study.sweep(sweep), study.slo, folder / "goodput.png")
    Console().print(f"pictures in {folder}")


def _print(result: dict[str, Any]) -> None:
    table = Table("figure", "value")
    for name, value in result.items():
        if name != "tenants":
            table.add_row(name, _text(value))
    Console().print(table)
    if (tenants := result.get("tenants")) is None:
        return
    own = Table("tenant", "offered", "finished", "attainment", "TTFT p50, ms", "TTFT p99, ms")
    for tenant, found in list(tenants.items())[:_SHOWN_TENANTS]:
        own.add_row(
            tenant,
            f"{found['num_offered']}",
            f"{found['num_finished']}",
            f"{found['attainment']:.1%}",
            f"{found['ttft_p50_ms']:.0f}",
            f"{found['ttft_p99_ms']:.0f}",
        )
    Console().print(own)
    if len(tenants) > _SHOWN_TENANTS:
        Console().print(f"and {len(tenants) - _SHOWN_TENANTS} smaller tenants, in --json")


def _text(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key} {one:.4g}" for key, one in value.items() if isinstance(one, int | float))
    return f"{value:.4g}"
