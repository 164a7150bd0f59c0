"""How long one engine step takes on a modelled device, and a transfer on a modelled link.

A step is four numbers: tokens computed, context (known tokens, summed over its sequences), pairs (query x key positions that
attention visits) and sequences. Two models behind one seam: a roofline from a GPU's data sheet, and a linear one fitted to
measured steps (`sim.catalogue.device_profile`)."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol

from core.cost.steps import chunk_pairs, unread_decay
from core.plan import StepPlan


class ModelledStep(Protocol):
    @property
    def unread_decay(self) -> float:
        """As core.cost.steps.unread_decay; 0: no experts are routed."""
        ...

    def step_s(self, num_tokens: int, context_tokens: int, num_pairs: float, num_seqs: int) -> float: ...


def duration_s(model: ModelledStep, plan: StepPlan) -> float:
    context = sum(work.start + work.count for work in plan.work)
    pairs = sum(chunk_pairs(work.start, work.count) for work in plan.work)
    return model.step_s(plan.num_tokens, context, pairs, len(plan.work))


@dataclass(frozen=True, slots=True)
class PacedCost:
    """The same device at another pace: steps that only decode, and those with prompts, take so many times as long."""

    model: ModelledStep
    decode: float
    prompt: float
    stream_s: float = 0.0
    """What each sequence but one adds to a step, where the device's processor delivers its tokens as well."""

    @property
    def unread_decay(self) -> float:
        return self.model.unread_decay

    def step_s(self, num_tokens: int, context_tokens: int, num_pairs: float, num_seqs: int) -> float:
        factor = self.decode if num_tokens == num_seqs else self.prompt
        device_s = factor * self.model.step_s(num_tokens, context_tokens, num_pairs, num_seqs)
        return device_s + self.stream_s * (num_seqs - 1)


@dataclass(frozen=True, slots=True)
class LinkCost:
    """Time on a link: latency and bytes over bandwidth."""

    latency_s: float = 5e-6
    bytes_per_s: float = 50e9

    def duration_s(self, num_bytes: float) -> float:
        return self.latency_s + num_bytes / self.bytes_per_s


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCost:
    """A roofline: overhead + max(compute, memory), compute = tokens and attention pairs, memory = weights and KV read."""

    overhead_s: float = 0.002
    tokens_per_s: float = 20_000.0
    """Prompt tokens per second when compute is the limit, attention aside."""
    weights_read_s: float = 0.004
    """Seconds to read once all weights that every token uses."""
    experts_read_s: float = 0.0
    """Seconds to read all routed experts once. A token uses `expert_share` of them, and each token uses its own."""
    expert_share: float = 0.0
    kv_token_read_s: float = 2e-8
    """Time to read one token's KV."""
    state_s: float = 0.0
    """Time to read and write one sequence's recurrent state."""
    pair_s: float = 0.0
    """Time of attention between one query and one key, over all layers."""
    chosen_tokens: int = 0
    """How many tokens a query attends to at the most, where it chooses them. The two times above are then those of scoring all
    tokens, and each chosen one takes `chosen_read_s` and `chosen_pair_s` besides. 0: a query attends to all."""
    chosen_read_s: float = 0.0
    chosen_pair_s: float = 0.0
    stages: int = 1
    """Stages of a pipeline. The times above are those of all layers; each stage has its share of them."""
    hop: LinkCost = LinkCost()
    """The link from one stage to the next."""
    hop_token_bytes: int = 0

    @property
    def unread_decay(self) -> float:
        return unread_decay(self.expert_share, self.stages) if self.experts_read_s else 0.0

    def step_s(self, num_tokens: int, context_tokens: int, num_pairs: float, num_seqs: int) -> float:
        """Return the time of a step. With stages, as many micro-batches as there are stages pass through them, each behind the
        one before. The first of a step waits for the last of the step before (`pipeline_stage`: of 2 stages each was idle for 37
        %, here it is 33 %)."""
        compute_s = self.compute_s(num_tokens, num_pairs)
        if self.stages == 1:
            return self.overhead_s + max(compute_s, self.memory_s(num_tokens, context_tokens, num_seqs))
        context_s, parts = self._kept_s(num_tokens, context_tokens, num_seqs), self.stages**2
        read_s = self._read_s(num_tokens / self.stages)
        part_s = max(compute_s / parts, read_s / self.stages + context_s / parts)
        hop_s = self.hop.duration_s(num_tokens * self.hop_token_bytes / self.stages)
        return self.overhead_s + (2 * self.stages - 1) * (part_s + hop_s)

    def compute_s(self, num_tokens: int, num_pairs: float) -> float:
        chosen_s = min(num_pairs, num_tokens * self.chosen_tokens) * self.chosen_pair_s
        return num_tokens / self.tokens_per_s + num_pairs * self.pair_s + chosen_s

    def memory_s(self, num_tokens: int, context_tokens: int, num_seqs: int) -> float:
        return self._read_s(num_tokens) + self._kept_s(num_tokens, context_tokens, num_seqs)

    def _kept_s(self, num_tokens: int, context_tokens: int, num_seqs: int) -> float:
        """Return the time to read what is kept of sequences. Chosen tokens are counted as though sequences were equally long."""
        chosen_s = min(context_tokens, num_tokens * self.chosen_tokens) * self.chosen_read_s
        return context_tokens * self.kv_token_read_s + chosen_s + num_seqs * self.state_s

    def _read_s(self, num_tokens: float) -> float:
        """Return the time to read the weights that so many tokens use."""
        if not self.experts_read_s:
            return self.weights_read_s
        return self.weights_read_s + self.experts_read_s * (1 - (1 - self.expert_share) ** num_tokens)

    def of_full_stages(self) -> "StepCost":
        """Return the time per step where no stage ever waits: no pipeline of them does better."""
        return StepCost(
            overhead_s=self.overhead_s,
            tokens_per_s=self.tokens_per_s * self.stages,
            weights_read_s=self.weights_read_s / self.stages,
            experts_read_s=self.experts_read_s / self.stages,
            expert_share=self.expert_share,
            kv_token_read_s=self.kv_token_read_s / self.stages,
            state_s=self.state_s / self.stages,
            pair_s=self.pair_s / self.stages,
            chosen_tokens=self.chosen_tokens,
            chosen_read_s=self.chosen_read_s / self.stages,
            chosen_pair_s=self.chosen_pair_s / self.stages,
        )


COMPUTING_PROCESSORS, READING_PROCESSORS = 0.86, 0.59
"""The shares of a card's processors that compute as fast as all of them, and that read as fast; fewer do in proportion."""
BESIDE = 1.3
"""While both instances of a card run, a step of either takes so many times as long."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedCost:
    """Steps on a card that another instance is on, too."""

    whole: StepCost
    """What they cost with all of the card, in one stage."""
    processors: float
    others: float
    """The other instance's share of the processors."""

    @property
    def unread_decay(self) -> float:
        return self.whole.unread_decay

    def step_s(
        self,
        num_tokens: int,
        context_tokens: int,
        num_pairs: float,
        num_seqs: int,
        *,
        beside: bool = False,
    ) -> float:
        """`beside`: the other instance runs a step."""
        processors = self.processors / max(1.0, self.processors + self.others) if beside else self.processors
        compute_s = self.whole.compute_s(num_tokens, num_pairs) / _reached(processors, COMPUTING_PROCESSORS)
        memory_s = self.whole.memory_s(num_tokens, context_tokens, num_seqs)
        alone_s = self.whole.overhead_s + max(compute_s, memory_s / _reached(processors, READING_PROCESSORS))
        return BESIDE * alone_s if beside else alone_s

    def alone(self) -> StepCost:
        """Return what they cost while the other one is idle."""
        whole, reads = self.whole, _reached(self.processors, READING_PROCESSORS)
        computes = _reached(self.processors, COMPUTING_PROCESSORS)
        return replace(
            whole,
            tokens_per_s=whole.tokens_per_s * computes,
            pair_s=whole.pair_s / computes,
            chosen_pair_s=whole.chosen_pair_s / computes,
            weights_read_s=whole.weights_read_s / reads,
            experts_read_s=whole.experts_read_s / reads,
            kv_token_read_s=whole.kv_token_read_s / reads,
            chosen_read_s=whole.chosen_read_s / reads,
            state_s=whole.state_s / reads,
        )


def _reached(processors: float, enough: float) -> float:
    """Return the share of the whole card's rate that so many processors reach, where `enough` of them reach all of it."""
    return min(1.0, processors / enough)


class SharedStep:
    """`ModelledStep` of one of two instances on a card, by whether the other one runs when the step begins."""

    def __init__(self, cost: SharedCost, is_beside: Callable[[], bool]) -> None:
        self._cost, self._is_beside = cost, is_beside

    @property
    def unread_decay(self) -> float:
        return self._cost.unread_decay

    def step_s(self, num_tokens: int, context_tokens: int, num_pairs: float, num_seqs: int) -> float:
        return self._cost.step_s(num_tokens, context_tokens, num_pairs, num_seqs, beside=self._is_beside())
