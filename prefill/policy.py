"""In which order a prefill instance computes prompts: earliest deadline first. Pure."""

from collections.abc import Sequence as Seq

from core.ports import S, Served
from core.steps import StepModels
from engine.pacing import tokens_in_time


class DeadlinePolicy:
    """By the time at which the first token is due; a class of higher priority always goes first.

    A deadline only comes nearer, so nothing starves within a class."""

    def order(self, waiting: Seq[S], now: float) -> Seq[S]:
        return sorted(waiting, key=lambda seq: (-seq.request.slo.priority, due_s(seq), seq.arrival))

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
        return max(running, key=lambda seq: (-seq.request.slo.priority, due_s(seq), seq.arrival))


def due_s(seq: Served) -> float:
    return seq.request.arrival_s + seq.request.slo.ttft_s
