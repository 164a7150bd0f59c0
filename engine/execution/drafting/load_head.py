"""Loads a head that proposes beside a rank's part of the model."""

from pathlib import Path
from typing import cast

import torch

from engine.execution.drafting.draft_head import DraftHead
from engine.execution.drafting.proposing import Agree
from engine.sizing.head_setup import HeadSetup
from kernels.cpu.prepacked import WeightFormat
from kernels.select import Kernels
from models.causal_model import CausalModel
from models.drafting.eagle import load_eagle
from models.drafting.mtp import load_mtp
from models.formats.checkpoint import Shard, whole
from models.spec.model_spec import LoadFormat


def load_head(
    setup: HeadSetup,
    target: CausalModel,
    num_blocks: int,
    device: torch.device,
    *,
    kernels: Kernels,
    load_format: LoadFormat,
    shard: Shard = whole,
    agree: Agree | None = None,
) -> DraftHead:
    """Load the head beside `target`, whose pool here has `num_blocks`. `shard` says which part of the model's own tensors is
    this rank's; an EAGLE-3 head is whole on each. `agree`: see `sample_drafts`. Raises ConfigError."""
    folder = Path(setup.folder)
    if setup.kind == "mtp":
        return DraftHead(
            load_mtp(folder, target, device, load_format, shard), setup.shard, num_blocks, device
        )
    head = load_eagle(
        folder,
        target,
        device,
        kernels=kernels,
        block_size=setup.shard.layout.block_size,
        weights=cast(WeightFormat, setup.weights),
    )
    return DraftHead(head, setup.shard, num_blocks, device, agree)
