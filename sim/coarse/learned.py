"""What an instance has learned of its step times after a while: the production fit, taught by the modelled device."""

import random

from core.steps import StepModels, chunk_pairs
from engine.planning.step_time_fit import StepFit
from sim.cost import ModelledStep

_NUM_STEPS = 300


def learned(step: ModelledStep, max_batch_tokens: int, max_num_seqs: int, seed: int = 0) -> StepModels:
    rng = random.Random(seed)
    decode, prompt = StepFit(), StepFit()
    for _ in range(_NUM_STEPS):
        batch = rng.randint(1, max_num_seqs)
        context = batch * rng.randint(100, 8000)
        decode.observe(batch, context, batch, step.step_s(batch, context, context, batch))
        count, start = rng.randint(16, max_batch_tokens), rng.randint(0, 8000)
        num_tokens, all_context = count + batch, context + start + count
        pairs = context + chunk_pairs(start, count)
        prompt.observe(
            num_tokens,
            all_context,
            batch + 1,
            step.step_s(num_tokens, all_context, pairs, batch + 1),
            pairs - context,
        )
    return StepModels(decode.model(), prompt.model())
