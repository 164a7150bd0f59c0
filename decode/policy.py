"""In which order a decode instance serves its sequences, and who gives way when blocks run out. Pure."""

from collections.abc import Sequence as Seq

from engine.sequence import Sequence


class HeadroomPolicy:
    """Preempted sequences come back before new ones of their class, since their clients already read.

    The victim is the sequence whose recomputation costs least among those of the lowest priority."""

    def order(self, waiting: Seq[Sequence], now: float) -> Seq[Sequence]:
        return sorted(waiting, key=lambda seq: (-seq.request.slo.priority, seq.num_output == 0, seq.arrival))

    def chunk(self, seq: Sequence, budget_tokens: int) -> int:
        return min(seq.num_missing, budget_tokens)

    def victim(self, running: Seq[Sequence]) -> Sequence:
        return min(running, key=lambda seq: (seq.request.slo.priority, len(seq.tokens), -seq.arrival))
