"""What `baton profile` measures: steps of the real engine over a grid, and the model that is fitted to them."""

import os
import platform

from rich.console import Console
from rich.progress import Progress

from cluster.instance.rank_memory import memory_of_replica
from core.config.cluster_config import load
from core.cost.step_profile import Profile
from core.cost.steps import chunk_pairs, unread_decay
from engine.execution.step_meter import PromptPiece, StepMeter
from models.files.hub import resolve
from sim.catalogue.device_profile import Sample, as_profile, fit

_CHUNKS = (16, 32, 64, 128, 256, 512)
_STARTS = (0, 128, 512, 1024)
_BATCHES = (1, 2, 4, 8, 16, 32)
_CONTEXTS = (16, 128, 512, 1024)
_BESIDE = (0, 4, 16)


def measured_profile(model: str, repeats: int) -> tuple[Profile, float, float]:
    """Return the profile, and by how much its decode and its prompt steps are off in the mean. Raises ConfigError."""
    config = load(None, os.environ, {"model.path": model})
    folder = resolve(config.model.path)
    # The meter has the threads and the memory of one of the configuration's instances, not of the whole machine.
    meter = StepMeter(config, folder, memory_of_replica(config, "decode", config.decode, None))
    limit = meter.size.max_context_tokens - 1
    grid = [step for step in _grid() if max(piece.start + piece.count for piece in step) < limit]
    times: list[list[float]] = [[] for _ in grid]
    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("steps", total=len(grid) * (repeats + 1))
        # Rounds over the whole grid, so that a slow minute slows all steps alike. The first one warms up.
        for turn in range(repeats + 1):
            for step, seen in zip(grid, times, strict=True):
                duration_s = meter.measure(step)
                if turn:
                    seen.append(duration_s)
                bar.advance(task)
    meter.close()
    samples = [_sample(step, sorted(seen)[len(seen) // 2]) for step, seen in zip(grid, times, strict=True)]
    cost = fit(samples, unread_decay(meter.size.expert_share))
    layout = meter.size.shard.layout
    profile = as_profile(
        cost,
        model=model,
        machine=f"{platform.machine()}, {meter.size.num_threads} thread(s)",
        num_blocks=meter.size.num_blocks,
        kv_token_bytes=layout.token_bytes,
        num_layers=layout.num_layers,
    )
    return profile, cost.models.decode.error, cost.models.prompt.error


def _grid() -> list[list[PromptPiece]]:
    decodes = [[PromptPiece(context, 1)] * batch for batch in _BATCHES for context in _CONTEXTS]
    prompts = [
        [PromptPiece(start, count), *[PromptPiece(128, 1)] * beside]
        for count in _CHUNKS
        for start in _STARTS
        for beside in _BESIDE
    ]
    return decodes + prompts


def _sample(step: list[PromptPiece], duration_s: float) -> Sample:
    return Sample(
        num_tokens=sum(piece.count for piece in step),
        context_tokens=sum(piece.start + piece.count for piece in step),
        num_pairs=sum(chunk_pairs(piece.start, piece.count) for piece in step),
        num_seqs=len(step),
        duration_s=duration_s,
    )
