"""Loads what makes the guesses of an instance's only rank."""

import torch

from core.config import EngineConfig
from engine.execution.draft_kv import draft_layers
from engine.execution.draft_model import DraftModel
from engine.execution.draft_size import DraftSize
from engine.execution.load_head import load_head
from engine.execution.proposing import Proposer
from models.causal_model import CausalModel
from models.registry import load_model
from models.spec import LoadFormat


def make_proposer(
    size: DraftSize | None,
    engine: EngineConfig,
    target: CausalModel,
    num_blocks: int,
    device: torch.device,
    load_format: LoadFormat,
) -> Proposer | None:
    """Load what `engine.speculate` asks for beside `target`, whose pool has `num_blocks`. None where ranks make no guesses.
    Raises ConfigError."""
    if size is None:
        return None
    if (setup := size.setup_of(0)) is not None:
        return load_head(setup, target, num_blocks, device, kernels=engine.kernels, load_format=load_format)
    model = load_model(
        size.folder,
        size.dtype,
        device,
        kernels=engine.kernels,
        block_size=engine.block_size,
        weights=size.weights,
    )
    layers = draft_layers(size.shards[0], num_blocks, device)
    return DraftModel(model, layers, engine.block_size, target.spec.vocab_size, device=device)
