"""Loads what makes the guesses of an instance's only rank."""

import torch

from core.config.cluster_config import EngineConfig
from engine.execution.drafting.draft_kv import draft_layers
from engine.execution.drafting.draft_model import DraftModel
from engine.execution.drafting.load_head import load_head
from engine.execution.drafting.proposing import Proposer
from engine.sizing.draft_size import DraftSize
from models.causal_model import CausalModel
from models.registry import LoadOptions, load_model
from models.spec.model_spec import LoadFormat


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
    options = LoadOptions(kernels=engine.kernels, block_size=engine.block_size, weights=size.weights)
    model = load_model(size.folder, size.dtype, device, options=options)
    layers = draft_layers(size.shards[0], num_blocks, device)
    return DraftModel(model, layers, engine.block_size, target.spec.vocab_size, device=device)
