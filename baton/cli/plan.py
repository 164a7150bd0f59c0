"""`baton plan`: the cheapest fleet that holds the targets on a trace, its headroom, what limits the others, a picture, JSON."""

from pathlib import Path
from typing import Annotated

import typer

from baton.cli.output_files import check_picture, check_writable
from sim.catalogue.catalogue import GPUS, MODELS


def plan(
    trace: Annotated[
        Path, typer.Option(help="Trace file: Mooncake, ShareGPT, Azure, ServeGen or sessions; .gz too.")
    ],
    model: Annotated[
        str, typer.Option(help=f"One of {', '.join(MODELS)}, or any model's config.json.")
    ] = "llama-3.1-8b",
    adapters_gb: Annotated[
        float, typer.Option(min=0, help="Memory that adapters and their slots take in each instance.")
    ] = 0.0,
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
    effort: Annotated[
        float,
        typer.Option(min=0, help="How much to simulate: 1 takes about five seconds; 0: search to the end."),
    ] = 1.0,
    output: Annotated[Path | None, typer.Option("--json", help="Write everything here.")] = None,
    picture: Annotated[Path | None, typer.Option(help="Attainment over price, as PNG or SVG.")] = None,
) -> None:
    """Find the cheapest GPUs, group size, number of instances and roles for a trace and its targets."""
    check_writable(output)
    check_picture(picture)
    from baton.cli.plan_answer import PlanQuestion, answer  # noqa: PLC0415 (a second, which --help does not need)

    answer(
        PlanQuestion(
            trace=trace,
            model=model,
            adapter_bytes=adapters_gb * 1e9,
            gpus=gpus.split(","),
            prices=prices,
            start_at=start if start >= 0 else None,
            window_s=seconds,
            copies=copies,
            ttft_s=ttft_ms / 1e3,
            tpot_s=tpot_ms / 1e3,
            attainment=attainment,
            max_instances=max_instances,
            effort=effort,
        ),
        output,
        picture,
    )
