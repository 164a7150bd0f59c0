"""In which order a prefill instance computes prompts: earliest deadline first. Pure."""

from collections.abc import Sequence as Seq

from core.steps import StepModels
from engine.pacing import tokens_in_time
from engine.sequence import Sequence


class DeadlinePolicy:
    """By the time at which the first token is due; a class of higher priority always goes first.

    A deadline only comes nearer, so nothing starves within a class."""

    def order(self, waiting: Seq[Sequence], now: float) -> Seq[Sequence]:
        return sorted(waiting, key=lambda seq: (-seq.request.slo.priority, due_s(seq), seq.arrival))

    def chunk(self, seq: Sequence, budget_tokens: int) -> int:
        return min(seq.num_missing, budget_tokens)

    def prompt_tokens(
        self,
        decoding: Seq[Sequence],
        context_tokens: int,
        prompts: Seq[Sequence],
        steps: StepModels,
        budget_tokens: int,
    ) -> int:
        return tokens_in_time(decoding, context_tokens, prompts, steps, budget_tokens)

    def victim(self, running: Seq[Sequence]) -> Sequence:
        return max(running, key=lambda seq: (-seq.request.slo.priority, due_s(seq), seq.arrival))


def due_s(seq: Sequence) -> float:
    return seq.request.arrival_s + seq.request.slo.ttft_s
