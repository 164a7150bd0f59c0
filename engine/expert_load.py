"""How often each expert is chosen, read off a model now and then."""

import time
from collections.abc import Callable
from dataclasses import replace

import torch

from core.plan import ExpertLoad, StepPlan, StepResult
from models.model import Model

INTERVAL_S = 1.0
"""A rank says what it has counted at most so often: reading the counts waits for the device."""


def counted(step: Callable[[StepPlan], StepResult], model: Model) -> Callable[[StepPlan], StepResult]:
    """`step`, whose results now and then carry the loads of `model`'s experts since the last time."""
    if not model.experts:
        return step
    due_s = time.monotonic() + INTERVAL_S

    def with_load(plan: StepPlan) -> StepResult:
        nonlocal due_s
        result = step(plan)
        if time.monotonic() < due_s:
            return result
        due_s = time.monotonic() + INTERVAL_S
        return replace(result, expert_loads=_take(model))

    return with_load


@torch.inference_mode()
def _take(model: Model) -> tuple[ExpertLoad, ...]:
    counts = model.expert_load.tolist()
    model.expert_load.zero_()
    return tuple(ExpertLoad(layer, tuple(counts[layer - model.layers.start])) for layer in model.experts)
