"""What placed requests take of an instance, one by one and added up, and how soon they give it back."""

from dataclasses import dataclass
from math import inf, sqrt
from typing import Final

_WAY_STEPS: Final = 2.5
"""The steps from when a slot is free until a sequence that is sent there computes: the report, the step that runs, the one
planned."""
_MAX_SPARE_SHARE: Final = 0.125
"""The largest share of all slots that is counted as about to be free. Where more were, outputs would be so short that slots do
not matter."""


class Promise:
    """What one placed request takes of one instance. Never changed (a dataclass takes ten times as long to make, compiled)."""

    __slots__ = (
        "compute_tokens", "context_tokens", "growth_blocks", "hashes", "late_tokens", "level", "made_at", "num_blocks",
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
        growth_blocks: int = 0,
        context_tokens: float = 0.0,
        tpot_s: float = inf,
        level: int = 0,
        late: bool = False,
        receiver: str = "",
        sent_bytes: int = 0,
    ) -> None:
        """`hashes` are the full prompt blocks that it will hold here. `growth_blocks` of its `num_blocks` are for its output,
        which comes by and by. `context_tokens` is the average length of a sequence that will decode here, `tpot_s` its target
        for the time per output token, and `level` its class's priority. `sent_bytes` of KV will go from here to the instance
        `receiver`."""
        self.made_at = made_at
        self.num_seqs, self.num_blocks, self.compute_tokens = num_seqs, num_blocks, compute_tokens
        self.growth_blocks = growth_blocks
        self.hashes, self.context_tokens = hashes, context_tokens
        self.tpot_s, self.level = tpot_s, level
        self.late_tokens = compute_tokens if late else 0
        self.receiver, self.sent_bytes = receiver, sent_bytes


class Turnover:
    """How soon sequence slots come free."""

    __slots__ = ("mean_output_tokens", "spare_share")

    def __init__(self) -> None:
        self.mean_output_tokens = inf
        """As many steps a sequence keeps its slot, on average; infinite until it is known."""
        self.spare_share = 0.0
        """The share of all slots that come free while a request is on its way to them."""

    def learn(self, mean_output_tokens: float) -> None:
        """Learn how long outputs are on average: a sequence ends after as many steps, so one in as many of a step's sequences
        ends with it."""
        self.mean_output_tokens = max(1.0, mean_output_tokens)
        self.spare_share = min(_MAX_SPARE_SHARE, _WAY_STEPS / self.mean_output_tokens)


def growth_share(num_seqs: int, num_slots: int) -> float:
    """Return the share of the room for outputs that so many sequences need between them.

    Sequences that began at different times have half of their output, on average. The root is for chance: a few may be near
    their ends together. What waits for a slot generates nothing."""
    if num_seqs <= 0:
        return 1.0
    num_decoding = max(1, min(num_seqs, num_slots))
    return min(1.0, 0.5 + 1 / sqrt(num_decoding)) * num_decoding / num_seqs


@dataclass(slots=True)
class PromiseSum:
    num_seqs: int = 0
    num_blocks: int = 0
    growth_blocks: int = 0
    compute_tokens: int = 0
    late_tokens: int = 0
    context_tokens: float = 0.0

    def add(self, promise: Promise, sign: int) -> None:
        self.num_seqs += sign * promise.num_seqs
        self.num_blocks += sign * promise.num_blocks
        self.growth_blocks += sign * promise.growth_blocks
        self.compute_tokens += sign * promise.compute_tokens
        self.late_tokens += sign * promise.late_tokens
        self.context_tokens += sign * promise.context_tokens

    def kept_blocks(self, growth_share: float) -> float:
        """Return the blocks that are kept where so large a share of the room for outputs is."""
        return self.num_blocks - (1.0 - growth_share) * self.growth_blocks
