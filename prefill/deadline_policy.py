"""The order in which a prefill instance computes prompts: earliest deadline first, and late ones after those."""

from collections.abc import Sequence as Seq
from functools import partial

from core.pacing.lateness import order_at, turn
from core.pacing.pacing import tokens_in_time
from core.ports import S
from core.scheduler_tuning import DEFAULT_TUNING, SchedulerTuning


class DeadlinePolicy:
    """By the time at which the first token is due; a class of higher priority always goes first.

    A deadline only comes nearer, so nothing starves within a class."""

    def __init__(self, tuning: SchedulerTuning = DEFAULT_TUNING) -> None:
        self.tuning = tuning
        self.prompt_tokens = partial(tokens_in_time, tuning=tuning)
        self.turn = partial(turn, tuning=tuning)

    def order(self, waiting: Seq[S], now: float) -> Seq[S]:
        return sorted(
            waiting,
            key=lambda seq: (-seq.request.slo.priority, order_at(seq.request, self.tuning), seq.arrival),
        )

    def victim(self, running: Seq[S]) -> S:
        return max(
            running,
            key=lambda seq: (-seq.request.slo.priority, order_at(seq.request, self.tuning), seq.arrival),
        )
