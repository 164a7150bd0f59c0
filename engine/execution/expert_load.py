"""Reads off a model, now and then, how often each expert was chosen."""

import time
from collections.abc import Callable
from dataclasses import replace
from typing import TypeVar

import torch

from core.plan import ExpertLoad, StepResult
from models.causal_model import CausalModel

P = TypeVar("P")

INTERVAL_S = 1.0
"""The shortest time between two reports of a rank's counts, since reading them waits for the device."""


def counted(step: Callable[[P], StepResult], model: CausalModel) -> Callable[[P], StepResult]:
    """Wrap `step` so that its results now and then carry the loads of `model`'s experts since the last time."""
    if not model.experts:
        return step
    due_at = time.monotonic() + INTERVAL_S

    def with_load(plan: P) -> StepResult:
        nonlocal due_at
        result = step(plan)
        if time.monotonic() < due_at:
            return result
        due_at = time.monotonic() + INTERVAL_S
        return replace(result, expert_loads=_take(model))

    return with_load


@torch.inference_mode()
def _take(model: CausalModel) -> tuple[ExpertLoad, ...]:
    counts = model.expert_load.tolist()
    model.expert_load.zero_()
    return tuple(ExpertLoad(layer, tuple(counts[layer - model.layers.start])) for layer in model.experts)
