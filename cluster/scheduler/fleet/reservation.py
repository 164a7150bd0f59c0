"""What placed requests take of an instance, one by one and added up, and how soon they give it back."""

from dataclasses import dataclass
from math import inf, sqrt

from cluster.scheduler.fleet.context_forecast import NO_CONTEXTS, Contexts, added, growth
from core.scheduler_tuning import DEFAULT_TUNING, SchedulerTuning


class PlacementReservation:
    """What one placed request takes of one instance. Never changed (a dataclass takes ten times as long to make, compiled)."""

    __slots__ = (
        "compute_tokens", "contexts", "hashes", "late_tokens", "level", "made_at", "num_blocks",
        "num_seqs", "receiver", "sent_bytes", "tpot_s",
    )  # fmt: skip

    def __init__(
        self,
        made_at: float,
        num_seqs: int,
        num_blocks: int,
        compute_tokens: int,
        *,
        hashes: tuple[int, ...],
        contexts: Contexts = NO_CONTEXTS,
        tpot_s: float = inf,
        level: int = 0,
        late: bool = False,
        receiver: str = "",
        sent_bytes: int = 0,
    ) -> None:
        """`hashes` are the full prompt blocks that it will hold here, and `num_blocks` what it takes of the pool as far as it has
        come. `contexts` are the tokens that a sequence will hold that decodes here, `tpot_s` its target for the time per output
        token, and `level` its class's priority. `sent_bytes` of KV will go from here to the instance
        `receiver`."""
        self.made_at = made_at
        self.num_seqs, self.num_blocks, self.compute_tokens = num_seqs, num_blocks, compute_tokens
        self.hashes, self.contexts = hashes, contexts
        self.tpot_s, self.level = tpot_s, level
        self.late_tokens = compute_tokens if late else 0
        self.receiver, self.sent_bytes = receiver, sent_bytes

    def grown(self, num_blocks: int, contexts: Contexts) -> "PlacementReservation":
        """Return the same of a sequence that has come further."""
        return PlacementReservation(
            self.made_at,
            self.num_seqs,
            num_blocks,
            self.compute_tokens,
            hashes=self.hashes,
            contexts=contexts,
            tpot_s=self.tpot_s,
            level=self.level,
            late=bool(self.late_tokens),
            receiver=self.receiver,
            sent_bytes=self.sent_bytes,
        )


class Turnover:
    """How soon sequence slots come free."""

    __slots__ = ("mean_output_tokens", "tuning")

    def __init__(self, tuning: SchedulerTuning = DEFAULT_TUNING) -> None:
        self.tuning = tuning
        self.mean_output_tokens = inf
        """As many steps a sequence keeps its slot, on average; infinite until it is known."""

    def learn(self, mean_output_tokens: float) -> None:
        """Learn how long outputs are on average: a sequence ends after as many steps, so one in as many of a step's sequences
        ends with it."""
        self.mean_output_tokens = max(1.0, mean_output_tokens)


def growth_blocks(contexts: Contexts, num_seqs: int, block_size: int) -> float:
    """Return the blocks that so many sequences need until the most is taken, and as chance may have it: the fewer they are, the
    larger a part of them may go on for longer than usual."""
    return (growth(contexts) + contexts[6] / sqrt(max(1, num_seqs))) / block_size


@dataclass(slots=True)
class ReservationSum:
    num_seqs: int = 0
    num_blocks: int = 0
    compute_tokens: int = 0
    late_tokens: int = 0
    contexts: Contexts = NO_CONTEXTS

    def add(self, reservation: PlacementReservation, sign: int) -> None:
        self.num_seqs += sign * reservation.num_seqs
        self.num_blocks += sign * reservation.num_blocks
        self.compute_tokens += sign * reservation.compute_tokens
        self.late_tokens += sign * reservation.late_tokens
        self.contexts = added(self.contexts, reservation.contexts, sign)
