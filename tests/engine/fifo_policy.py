"""An order without targets, for tests of what plans steps."""

from collections.abc import Sequence as Seq

from core.cost.steps import StepModels
from core.ports import S, ServedSequence
from core.scheduler_tuning import DEFAULT_TUNING


class FifoPolicy:
    """Higher priority first, then first come, first served; the latest arrival gives way when blocks run out."""

    tuning = DEFAULT_TUNING

    def order(self, waiting: Seq[S], now: float) -> Seq[S]:
        return sorted(waiting, key=lambda seq: (-seq.request.slo.priority, seq.arrival))

    def prompt_tokens(
        self,
        decoding: Seq[ServedSequence],
        context_tokens: int,
        prompts: Seq[ServedSequence],
        steps: StepModels,
        budget_tokens: int,
        starts_at: float,
    ) -> int:
        return budget_tokens

    def turn(self, seq: ServedSequence, now: float, steps: StepModels) -> tuple[int, bool]:
        """What has been begun goes on."""
        return 0, False

    def victim(self, running: Seq[S]) -> S:
        return max(running, key=lambda seq: (-seq.request.slo.priority, seq.arrival))
