"""What placed requests take of an instance, one by one and added up, and how soon they give it back."""

from dataclasses import dataclass
from math import inf

from core.scheduler_tuning import DEFAULT_TUNING, SchedulerTuning


class PlacementReservation:
    """What one placed request takes of one instance. Never changed (a dataclass takes ten times as long to make, compiled)."""

    __slots__ = (
        "compute_tokens", "context_tokens", "hashes", "late_tokens", "level", "made_at", "num_blocks",
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
        context_tokens: int = 0,
        tpot_s: float = inf,
        level: int = 0,
        late: bool = False,
        receiver: str = "",
        sent_bytes: int = 0,
    ) -> None:
        """`hashes` are the full prompt blocks that it will hold here, and `num_blocks` what it takes of the pool as far as it has
        come. A sequence that decodes here holds `context_tokens` by then. `tpot_s` is its target for the time per output token,
        and `level` its class's priority. `sent_bytes` of KV will go from here to the instance `receiver`."""
        self.made_at = made_at
        self.num_seqs, self.num_blocks, self.compute_tokens = num_seqs, num_blocks, compute_tokens
        self.hashes, self.context_tokens = hashes, context_tokens
        self.tpot_s, self.level = tpot_s, level
        self.late_tokens = compute_tokens if late else 0
        self.receiver, self.sent_bytes = receiver, sent_bytes

    def grown(self, num_blocks: int, context_tokens: int) -> "PlacementReservation":
        """Return the same of a sequence that has come further."""
        return PlacementReservation(
            self.made_at,
            self.num_seqs,
            num_blocks,
            self.compute_tokens,
            hashes=self.hashes,
            context_tokens=context_tokens,
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


@dataclass(slots=True)
class ReservationSum:
    num_seqs: int = 0
    num_blocks: int = 0
    compute_tokens: int = 0
    late_tokens: int = 0
    context_tokens: int = 0

    def add(self, reservation: PlacementReservation, sign: int) -> None:
        self.num_seqs += sign * reservation.num_seqs
        self.num_blocks += sign * reservation.num_blocks
        self.compute_tokens += sign * reservation.compute_tokens
        self.late_tokens += sign * reservation.late_tokens
        self.context_tokens += sign * reservation.context_tokens
