"""The order in which a decode instance serves its sequences, and which one gives way when blocks run out."""

from collections.abc import Sequence as Seq
from functools import partial

from core.pacing.lateness import turn
from core.pacing.pacing import tokens_in_time
from core.ports import S
from core.scheduler_tuning import DEFAULT_TUNING, SchedulerTuning


class HeadroomPolicy:
    """Preempted sequences come back before new ones of their class, since their clients already read.

    The victim is the sequence whose recomputation costs least among those of the lowest priority."""

    def __init__(self, tuning: SchedulerTuning = DEFAULT_TUNING) -> None:
        self.tuning = tuning
        self.prompt_tokens = partial(tokens_in_time, tuning=tuning)
        self.turn = partial(turn, tuning=tuning)

    def order(self, waiting: Seq[S], now: float) -> Seq[S]:
        return sorted(waiting, key=lambda seq: (-seq.request.slo.priority, seq.num_output == 0, seq.arrival))

    def victim(self, running: Seq[S]) -> S:
        return min(running, key=lambda seq: (seq.request.slo.priority, len(seq.tokens), -seq.arrival))
