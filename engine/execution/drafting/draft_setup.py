"""Loads what makes the draft tokens of an instance's only rank."""

import torch

from core.config.cluster_config import EngineConfig
from engine.execution.drafting.draft_kv import draft_layers
from engine.execution.drafting.draft_model import DraftModel
from engine.execution.drafting.load_head import load_head
from engine.execution.drafting.proposing import Proposer
from engine.sizing.pool_size import PoolSize
from models.causal_model import CausalModel
from models.registry import LoadOptions, load_model


def make_proposer(
    whole: PoolSize,
    engine: EngineConfig,
    target: CausalModel,
    num_blocks: int,
    device: torch.device,
) -> Proposer | None:
    """Load what `engine.speculate` asks for beside `target`, whose pool has `num_blocks`. None where ranks make no draft tokens.
    Raises ConfigError."""
    if (size := whole.draft) is None:
        return None
    if (setup := size.setup_of(0)) is not None:
        return load_head(
            setup, target, num_blocks, device, kernels=engine.kernels, load_format=whole.load_format
        )
    options = LoadOptions(
        kernels=engine.kernels,
        block_size=engine.block_size,
        weights=size.weights,
        packed_cache=whole.packed_cache,
    )
    model = load_model(size.folder, size.dtype, device, options=options)
    layers = draft_layers(size.shards[0], num_blocks, device)
    return DraftModel(model, layers, engine.block_size, target.spec.vocab_size, device=device)
