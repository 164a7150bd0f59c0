"""What requests take of an instance at least, and which no idle instance could serve in time: `sim.bound` in columns."""

from dataclasses import dataclass

import numpy
from numpy.typing import NDArray

from core.types import Slo
from sim.bound import EngineBound
from sim.planning.plan_load import Column, Columns

_BATCH = 32
"""Sequences of a step, for how many of a model's experts it reads."""


@dataclass(frozen=True, slots=True)
class RequestNeeds:
    """sim.planning.plan_load.Work. Instance seconds of each request: its prompt, and its share of decode steps that are as full
    as their target, slots and blocks allow. The hopeless, which are refused where others wait, take none."""

    prompt_s: Column
    compute_s: Column
    """What decoding takes where compute is the limit."""
    memory_s: Column
    """What decoding takes where memory is the limit, which compute overlaps with."""
    hopeless: NDArray[numpy.bool_]
    """Whether it misses a target even on an idle instance."""

    @property
    def decode_s(self) -> Column:
        return numpy.maximum(self.compute_s, self.memory_s)

    @property
    def total_prompt_s(self) -> float:
        return float(self.prompt_s.sum())

    @property
    def total_decode_s(self) -> float:
        """Return what all decoding takes of instances that do nothing else."""
        return max(float(self.compute_s.sum()), float(self.memory_s.sum()))

    @property
    def total_s(self) -> float:
        """Return what everything takes of instances that do both in the same steps."""
        return max(self.total_prompt_s + float(self.compute_s.sum()), float(self.memory_s.sum()))

    def of(self, chosen: NDArray[numpy.bool_]) -> "RequestNeeds":
        """Return those of the chosen requests."""
        return RequestNeeds(
            self.prompt_s[chosen], self.compute_s[chosen], self.memory_s[chosen], self.hopeless[chosen]
        )

    @property
    def hopeless_share(self) -> float:
        return float(self.hopeless.mean()) if len(self.hopeless) else 0.0


def request_needs(
    load: Columns, slo: Slo, engine: EngineBound, stages: int = 1, tokens: EngineBound | None = None
) -> RequestNeeds:
    """`tokens`: what tokens are computed by, where it is not what prompts are."""
    cached, decoded = load.prompt - load.new, load.output - 1
    pairs = load.new * (cached + (load.new + 1) / 2)
    prompt_s = load.new / engine.cost.tokens_per_s + pairs * engine.cost.pair_s
    prompt_s += numpy.minimum(pairs, load.new * engine.cost.chosen_tokens) * engine.cost.chosen_pair_s
    hopeless = engine.cost.overhead_s + prompt_s > slo.ttft_s
    engine = tokens or engine
    cost = engine.cost
    context = load.prompt + load.output / 2
    read_s = context * cost.kv_token_read_s + cost.state_s
    read_s += numpy.minimum(context, cost.chosen_tokens) * cost.chosen_read_s
    alone_s = cost.step_s(1, 0, 0, 1)
    hopeless |= (decoded > 0) & (alone_s + read_s > slo.tpot_s)
    full_s = cost.overhead_s + cost.weights_read_s
    full_s += cost.experts_read_s * (1 - (1 - cost.expert_share) ** _BATCH)
    room_s = max(1e-9, slo.tpot_s - full_s)
    kept_share = (context + engine.state_tokens) / engine.kv_tokens
    fills = numpy.maximum(numpy.maximum(read_s / room_s, 1 / engine.max_num_seqs), kept_share)
    # Stages of a pipeline wait for each other: `cost` is that of full ones.
    waits = (2 * stages - 1) / stages
    memory_s = decoded * (read_s + full_s * numpy.minimum(fills, 1.0))
    prompt_s, compute_s, memory_s = (
        numpy.where(hopeless, 0, waits * takes_s)
        for takes_s in (prompt_s, decoded / cost.tokens_per_s, memory_s)
    )
    return RequestNeeds(prompt_s, compute_s, memory_s, hopeless)
