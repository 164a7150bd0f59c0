"""The order in which a prefill instance computes prompts: earliest deadline first, and late ones after those."""

from collections.abc import Sequence as Seq

from core.pacing.lateness import order_at, turn
from core.pacing.pacing import tokens_in_time
from core.ports import S


class DeadlinePolicy:
    """By the time at which the first token is due; a class of higher priority always goes first.

    A deadline only comes nearer, so nothing starves within a class."""

    prompt_tokens = staticmethod(tokens_in_time)
    turn = staticmethod(turn)

    def order(self, waiting: Seq[S], now: float) -> Seq[S]:
        return sorted(
            waiting, key=lambda seq: (-seq.request.slo.priority, order_at(seq.request), seq.arrival)
        )

    def victim(self, running: Seq[S]) -> S:
        return max(running, key=lambda seq: (-seq.request.slo.priority, order_at(seq.request), seq.arrival))
