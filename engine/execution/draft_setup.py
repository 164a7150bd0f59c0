"""Puts a draft model before a rank's steps."""

import torch

from core.config import EngineConfig
from engine.execution.draft_kv import draft_layers
from engine.execution.draft_model import DraftModel, Step
from engine.execution.draft_size import DraftSize
from models.registry import load_model


def with_draft(
    step: Step,
    size: DraftSize | None,
    engine: EngineConfig,
    num_blocks: int,
    vocab_size: int,
    device: torch.device,
) -> Step:
    """Return `step` with the guesses of the draft model in its plans; as it is where there is none. Loads the model. `num_blocks`
    and `vocab_size` are the target's. Raises ConfigError."""
    if size is None:
        return step
    model = load_model(
        size.folder,
        size.dtype,
        device,
        kernels=engine.kernels,
        block_size=engine.block_size,
        weights=size.weights,
    )
    layers = draft_layers(size.shard, num_blocks, device)
    return DraftModel(step, model, layers, engine.block_size, vocab_size, device=device).step
