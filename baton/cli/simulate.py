"""`baton simulate`: a trace through the production scheduler on modelled GPUs, under virtual time."""

from pathlib import Path
from typing import Annotated

import typer

from baton.cli.output_files import check_writable, make_folder
from core.errors import ConfigError
from sim.catalogue.catalogue import GPUS, MODELS


def simulate(
    trace: Annotated[
        Path, typer.Option(help="Trace file: Mooncake, ShareGPT, Azure, ServeGen or sessions; .gz too.")
    ],
    gpu: Annotated[str, typer.Option(help=f"One of {', '.join(GPUS)}.")] = "H100",
    model: Annotated[
        str, typer.Option(help=f"One of {', '.join(MODELS)}, or any model's config.json.")
    ] = "llama-3.1-8b",
    adapters_gb: Annotated[
        float, typer.Option(min=0, help="Memory that adapters and their slots take in each instance.")
    ] = 0.0,
    host_gb: Annotated[
        float, typer.Option(min=0, help="Host memory of each instance that keeps KV, with --coarse.")
    ] = 0.0,
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
    check_writable(output)
    make_folder(report)
    from baton.cli.simulate_run import Scenario, run  # noqa: PLC0415 (a second, which --help does not need)

    run(
        Scenario(
            trace=trace,
            gpu=gpu,
            model=model,
            adapter_bytes=adapters_gb * 1e9,
            host_bytes=host_gb * 1e9,
            num_prefill=prefill,
            num_decode=decode,
            num_both=both,
            seconds=seconds,
            ttft_s=ttft_ms / 1e3,
            tpot_s=tpot_ms / 1e3,
            coarse=coarse,
            profile=profile,
            config=config,
            failures=tuple(fail or ()),
            cold_start_s=cold_start_s if autoscale else None,
            seed=seed,
        ),
        copies,
        output,
        report,
        numbers,
    )


def _numbers(sweep: str) -> list[int]:
    """Parse numbers. Raises ConfigError."""
    try:
        numbers = [int(part) for part in sweep.split(",") if part.strip()]
    except ValueError:
        numbers = [0]
    if any(number < 1 for number in numbers):
        raise ConfigError(f"--sweep {sweep}: whole numbers of copies by commas, from 1 on")
    return numbers
