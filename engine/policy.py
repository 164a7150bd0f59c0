"""In which order an engine serves its sequences: the default. Pure."""

from collections.abc import Sequence as Seq

from core.steps import StepModels
from engine.sequence import Sequence


class FifoPolicy:
    """Higher priority first, then first come, first served; the latest arrival gives way when blocks run out."""

    def order(self, waiting: Seq[Sequence], now: float) -> Seq[Sequence]:
        return sorted(waiting, key=lambda seq: (-seq.request.slo.priority, seq.arrival))

    def chunk(self, seq: Sequence, budget_tokens: int) -> int:
        """How many of the sequence's missing tokens the next step computes."""
        return min(seq.num_missing, budget_tokens)

    def prompt_tokens(
        self,
        decoding: Seq[Sequence],
        context_tokens: int,
        prompts: Seq[Sequence],
        steps: StepModels,
        budget_tokens: int,
    ) -> int:
        return budget_tokens

    def victim(self, running: Seq[Sequence]) -> Sequence:
        return max(running, key=lambda seq: (-seq.request.slo.priority, seq.arrival))
