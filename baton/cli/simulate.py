"""`baton simulate`: a trace through the production scheduler and workers on modelled GPUs, under virtual time."""

import json
import math
import time
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from baton.bench.measure import percentiles
from baton.bench.traces import read_trace
from core.config import load
from core.errors import ConfigError
from sim.catalogue import GPUS, MODELS, link_cost, num_blocks, step_cost
from sim.loop import run_virtual
from sim.run import Arrival, Outcome, SimConfig
from sim.run import simulate as run
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
    seed: Annotated[int, typer.Option(help="Seed of arrivals and tokens.")] = 0,
    output: Annotated[Path | None, typer.Option("--json", help="Write the figures here.")] = None,
) -> None:
    """Serve a trace on a modelled cluster and report latencies and SLO attainment."""
    work = arrivals(read_trace(trace, seed), seconds, copies, seed)
    config = _config(gpu, model, prefill, decode)
    began = time.perf_counter()
    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("requests", total=len(work))
        outcome = run_virtual(run(config, work, finished=lambda: bar.advance(task)))
    figures = _figures(work, outcome, ttft_ms, tpot_ms) | {"wall_s": time.perf_counter() - began}
    _print(figures)
    if output is not None:
        output.write_text(json.dumps(figures, indent=2) + "\n")


def _config(gpu: str, model: str, prefill: int, decode: int) -> SimConfig:
    if gpu not in GPUS or model not in MODELS:
        raise ConfigError(
            f"unknown GPU or model: {gpu}, {model}; known: {', '.join(GPUS)}; {', '.join(MODELS)}"
        )
    device, shape = GPUS[gpu], MODELS[model]
    cost = step_cost(device, shape)
    return SimConfig(
        num_prefill=prefill,
        num_decode=decode,
        num_blocks=num_blocks(device, shape, load(None, {}, {}).engine.block_size),
        num_layers=shape.num_layers,
        num_kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        step_overhead_s=cost.overhead_s,
        tokens_per_s=cost.tokens_per_s,
        weights_read_s=cost.weights_read_s,
        kv_token_read_s=cost.kv_token_read_s,
        link=link_cost(device),
    )


def _figures(work: list[Arrival], outcome: Outcome, ttft_ms: float, tpot_ms: float) -> dict[str, Any]:
    """Every offered request counts: one without an end missed its targets."""
    ttft = [first * 1e3 for first in outcome.first_token_s]
    tpot = [
        (last - first) * 1e3 / max(1, len(tokens) - 1) if math.isfinite(last) else math.inf
        for first, last, tokens in zip(
            outcome.first_token_s, outcome.last_token_s, outcome.tokens, strict=True
        )
    ]
    good = sum(a <= ttft_ms and b <= tpot_ms for a, b in zip(ttft, tpot, strict=True))
    return {
        "num_offered": len(work),
        "num_finished": sum(map(math.isfinite, ttft)),
        "ttft_ms": percentiles([value for value in ttft if math.isfinite(value)]),
        "tpot_ms": percentiles([value for value in tpot if math.isfinite(value)]),
        "attainment": good / len(work),
        "output_tokens": sum(map(len, outcome.tokens)),
    }


def _print(figures: dict[str, Any]) -> None:
    table = Table("figure", "value")
    for name, value in figures.items():
        text = (
            ", ".join(f"{k} {v:.1f}" for k, v in value.items()) if isinstance(value, dict) else f"{value:.4g}"
        )
        table.add_row(name, text)
    Console().print(table)
