"""What the pusher has in hand: grants that are being filled, the chunks of a step, and what waits to go out."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from core.messages import Grant, HandoverTimes, RegionKey
from core.types import TokenOut
from kvtransfer.copies import Side, VectorRun
from kvtransfer.linkqueue import Urgency
from kvtransfer.transport.base import Sender


@dataclass(slots=True, eq=False)
class Push:
    """One grant that is being filled. `targets` are the holder's ranks and how each is reached."""

    grant: Grant
    targets: list[tuple[Sender, RegionKey]]
    urgency: Urgency
    on_delivered: Callable[[str], None]
    on_quiet: Callable[[str], None]
    on_failed: Callable[[str, str], None]
    opened_s: float
    duties: list[list[int]]
    """For each rank of the writer the targets that it writes to."""
    started_s: float | None = None
    """The first step with its prompt."""
    written_s: float | None = None
    """The end of its first write."""
    drawn_s: float = 0.0
    """The first token."""
    stopped: bool = False
    closing: bool = False
    """Its last word waits: nothing that is computed from now on is sent."""
    num_chunks: int = 0
    num_bytes: int = 0
    queued_bytes: int = 0
    writing_since_s: float | None = None

    def times(self, now: float) -> HandoverTimes:
        opened_s = self.opened_s
        return HandoverTimes(
            self.targets[0][0].name if self.targets else "",
            (self.started_s or opened_s) - opened_s,
            (self.written_s or opened_s) - opened_s,
            now - self.drawn_s,
        )


@dataclass(frozen=True, slots=True)
class TargetPlan:
    """What of a chunk goes from one of our ranks to one of the holder's, for the first layer."""

    sender: Sender
    region: RegionKey
    source: Side
    side: Side
    runs: list[VectorRun]

    @property
    def layer_bytes(self) -> int:
        layout = self.source.shard.layout
        return sum(run.count for run in self.runs) * (layout.vector_bytes + layout.scale_bytes)


@dataclass(slots=True, eq=False)
class Chunk:
    """One work of a step."""

    push: Push
    first_token: int
    num_tokens: int
    plans: list[list[TargetPlan]]
    """Of each of our ranks."""
    num_left: int
    """Layers that are still to be written, over all ranks."""
    vouched_bytes: int = 0

    def layer_bytes(self, rank: int) -> int:
        return sum(plan.layer_bytes for plan in self.plans[rank])


@dataclass(slots=True, eq=False)
class Write:
    chunk: Chunk
    rank: int
    layer: int

    @property
    def num_bytes(self) -> int:
        return self.chunk.layer_bytes(self.rank)


@dataclass(slots=True, eq=False)
class Word:
    """Something to say to the holder once all writes before it are done."""

    push: Push
    drawn: Sequence[TokenOut]
    """Empty when it is stopped."""
    reason: str | None
