"""In which order a decode instance serves its sequences, and who gives way when blocks run out. Pure."""

from collections.abc import Sequence as Seq

from core.ports import S, Served
from core.steps import StepModels
from engine.pacing import tokens_in_time


class HeadroomPolicy:
    """Preempted sequences come back before new ones of their class, since their clients already read.

    The victim is the sequence whose recomputation costs least among those of the lowest priority."""

    def order(self, waiting: Seq[S], now: float) -> Seq[S]:
        return sorted(waiting, key=lambda seq: (-seq.request.slo.priority, seq.num_output == 0, seq.arrival))

    def chunk(self, seq: Served, budget_tokens: int) -> int:
        return min(seq.num_missing, budget_tokens)

    def prompt_tokens(
        self,
        decoding: Seq[Served],
        context_tokens: int,
        prompts: Seq[Served],
        steps: StepModels,
        budget_tokens: int,
    ) -> int:
        return tokens_in_time(decoding, context_tokens, prompts, steps, budget_tokens)

    def victim(self, running: Seq[S]) -> S:
        return min(running, key=lambda seq: (seq.request.slo.priority, len(seq.tokens), -seq.arrival))
