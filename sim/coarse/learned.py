"""What an instance has learned of its step times after a while: the production fit, taught by the modelled device."""

import random

from core.cost.steps import UNKNOWN_STEPS, StepModels, chunk_pairs, with_experts
from engine.planning.step_time_fit import StepFits
from sim.catalogue.cost import ModelledStep

_NUM_STEPS = 300


def learned(
    step: ModelledStep, max_batch_tokens: int, max_num_seqs: int, seed: int = 0, *, knows_experts: bool = True
) -> StepModels:
    rng = random.Random(seed)
    fits = StepFits(with_experts(UNKNOWN_STEPS, step.unread_decay if knows_experts else 0.0))
    for _ in range(_NUM_STEPS):
        batch = rng.randint(1, max_num_seqs)
        context = batch * rng.randint(100, 8000)
        fits.observe_decode(batch, context, batch, step.step_s(batch, context, context, batch))
        count, start = rng.randint(16, max_batch_tokens), rng.randint(0, 8000)
        num_tokens, all_context = count + batch, context + start + count
        pairs = chunk_pairs(start, count)
        duration_s = step.step_s(num_tokens, all_context, context + pairs, batch + 1)
        fits.observe_mixed(num_tokens, all_context, batch + 1, duration_s, pairs)
    return fits.models
