"""Samples from given logits, at once."""

from collections.abc import Sequence

import torch

from core.plan import Sampled
from engine.execution.batch.batch import History
from engine.execution.batch.step_memory import HostSteps, Pack
from engine.execution.sampling.grammar_masks import RowMasks
from engine.execution.sampling.sampler import RowSampling
from kernels.ops import Ops


def sample(
    logits: torch.Tensor,
    keys: Sequence[str],
    seqs: Sequence[History],
    ops: Ops,
    masks: RowMasks | None = None,
) -> list[Sampled]:
    """Sample one token for each row of `logits` (N, V) of floats, which may be overwritten."""
    pack, step = Pack(), HostSteps(logits.device).begin()
    rows = RowSampling(seqs, pack, masks)
    pack.send(step.upload)
    step.give(rows.sample(logits, ops, step))
    return rows.sampled(keys, step.read())
