"""`baton profile`: measures the real engine's steps on this machine and writes the step-time model that simulations read."""

import os
import platform
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import Progress

from core.config import load
from core.steps import chunk_pairs
from engine.execution.step_meter import Piece, StepMeter
from models.hub import resolve
from sim.profile import Sample, as_profile, fit

_CHUNKS = (16, 32, 64, 128, 256, 512)
_STARTS = (0, 128, 512, 1024)
_BATCHES = (1, 2, 4, 8, 16, 32)
_CONTEXTS = (16, 128, 512, 1024)
_BESIDE = (0, 4, 16)


def profile(
    output: Annotated[Path, typer.Argument(help="File to write (JSON).")],
    model: Annotated[str, typer.Option(help="A Hugging Face folder or hub id; `embedded`.")] = "embedded",
    repeats: Annotated[int, typer.Option(min=1, help="Times each step is measured; the median counts.")] = 5,
) -> None:
    """Measure steps of the real engine over a grid of prompts, batches and contexts, and fit the step-time model."""
    config = load(None, os.environ, {"model.path": model})
    folder = resolve(config.model.path)
    meter = StepMeter(config, folder)
    limit = meter.size.max_context_tokens - 1
    grid = [step for step in _grid() if max(piece.start + piece.count for piece in step) < limit]
    times: list[list[float]] = [[] for _ in grid]
    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("steps", total=len(grid) * (repeats + 1))
        for turn in range(
            repeats + 1
        ):  # rounds over the whole grid, so that a slow minute hurts all alike; the first warms up
            for step, seen in zip(grid, times, strict=True):
                duration_s = meter.measure(step)
                if turn:
                    seen.append(duration_s)
                bar.advance(task)
    meter.close()
    cost = fit([_sample(step, sorted(seen)[len(seen) // 2]) for step, seen in zip(grid, times, strict=True)])
    layout = meter.size.shard.layout
    result = as_profile(
        cost,
        model=model,
        machine=f"{platform.machine()}, {config.engine.num_threads} thread(s)",
        num_blocks=meter.size.num_blocks,
        kv_token_bytes=layout.token_bytes,
        num_layers=layout.num_layers,
    )
    output.write_text(result.model_dump_json(indent=2) + "\n")
    Console().print(
        f"{output}: decode steps {cost.models.decode.error:.1%} off in the mean, prompt steps {cost.models.prompt.error:.1%}"
    )


def _grid() -> list[list[Piece]]:
    decodes = [[Piece(context, 1)] * batch for batch in _BATCHES for context in _CONTEXTS]
    prompts = [
        [Piece(start, count), *[Piece(128, 1)] * beside]
        for count in _CHUNKS
        for start in _STARTS
        for beside in _BESIDE
    ]
    return decodes + prompts


def _sample(step: list[Piece], duration_s: float) -> Sample:
    return Sample(
        num_tokens=sum(piece.count for piece in step),
        context_tokens=sum(piece.start + piece.count for piece in step),
        num_pairs=sum(chunk_pairs(piece.start, piece.count) for piece in step),
        num_seqs=len(step),
        duration_s=duration_s,
    )
