"""Many steps of one batch at once: equal but for the context that grows by as much in each.

Invariant: step j (from 0) takes `first_s + j * slope_s`, so `elapsed_s` and its inverse have closed forms."""

import math
from dataclasses import dataclass

from sim.catalogue.cost import ModelledStep
from sim.coarse.decode_batch import DecodeBatch


@dataclass(slots=True)
class Burst:
    began_at: float
    num_steps: int
    first_s: float
    slope_s: float = 0.0

    @property
    def end_at(self) -> float:
        return self.began_at + self.elapsed_s(self.num_steps)

    @property
    def last_began_at(self) -> float:
        return self.began_at + self.elapsed_s(self.num_steps - 1)

    def elapsed_s(self, num_steps: int) -> float:
        return num_steps * self.first_s + self.slope_s * num_steps * (num_steps - 1) / 2

    def num_done(self, now: float) -> int:
        """Return the whole steps that are over at `now`."""
        elapsed_s = max(0.0, now - self.began_at)
        half = self.slope_s / 2
        linear = self.first_s - half
        done = 2 * elapsed_s / (linear + math.sqrt(linear * linear + 4 * half * elapsed_s))
        return min(int(done + 1e-9), self.num_steps)


def decoding_burst(now: float, decoding: DecodeBatch, step: ModelledStep) -> Burst:
    """Return the steps that only decode, until a sequence ends or needs another block."""
    num_steps, batch, context = decoding.steps_to_change(), len(decoding), decoding.context
    first_s = step.step_s(batch, context, context, batch)
    if num_steps == 1:
        return Burst(now, 1, first_s)
    last = context + batch * (num_steps - 1)
    slope_s = (step.step_s(batch, last, last, batch) - first_s) / (num_steps - 1)
    return Burst(now, num_steps, first_s, slope_s)
