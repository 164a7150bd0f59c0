"""The seam between hand-over and transports.

The holder of the blocks has a Receiver for each way in which it can be reached, and the writer has a Sender for each way in which
it can write. A transport never decides whether a write is allowed. The Receiver asks the ledger; or the writer's process is
trusted for as long as it lives (shared memory), and fenced by its death."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from core.errors import TransferError
from core.kv import KVShard
from core.messages import RegionKey
from kvtransfer.copies import CopyRun

MayWrite = Callable[[str, int, int], bool]
"""(grant id, first byte, end byte) -> is this write covered by a live grant?"""
Arrived = Callable[[str, int], None]
"""(grant id, bytes) -> None. Called with each number of bytes of a grant that has come into the pool."""

PROBE = "\0probe"
"""Stands in place of a grant's id for bytes that the holder drops and answers, so that a writer can measure the way to it."""


class Holder(Protocol):
    """The ledger as a receiver sees it: asked about each write, and told of it."""

    @property
    def may_write(self) -> MayWrite: ...
    @property
    def arrived(self) -> Arrived: ...
    @property
    def corrupted(self) -> Callable[[str], None]:
        """(grant id) -> None. Called when bytes of it have arrived damaged twice."""
        ...


class Receiver(Protocol):
    def region(self, shard: KVShard, num_blocks: int) -> RegionKey: ...
    def when_idle(self, grant_id: str, then: Callable[[], None]) -> None:
        """Call `then` once no write under this grant is half done: at once where there is none."""
        ...

    def ended(self, grant_id: str) -> None:
        """Drop what was kept for a grant that its writer is done with. Unknown grants are allowed."""
        ...

    async def fence(self, writer: str, grant_id: str) -> None:
        """Wait until nothing that `writer` (its mail address) may still do under this grant can change the pool. The grant is
        refused already."""
        ...

    async def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Carried:
    """How much of what was written has arrived at the holder's host since this was last asked, and for how many seconds some of
    it was on the way."""

    num_bytes: int
    busy_s: float


class Sender(Protocol):
    name: str
    vouches: bool
    """Whether ChunkDone must say how many bytes were written, because the Receiver cannot count them."""

    def reaches(self, region: RegionKey) -> bool: ...
    async def write(self, grant_id: str, region: RegionKey, runs: Sequence[CopyRun]) -> None:
        """Write the runs. Returns when the source may be reused. Raises ReplicaLost, or TransferError when the holder cannot take
        these runs.

        With checksums it returns only when the holder has found the bytes right; bytes that arrived damaged are sent once
        more."""
        ...

    def carried(self, region: RegionKey) -> Carried | None:
        """Return what has become of the writes to this endpoint. None where a write ends only when its bytes are there."""
        ...

    async def probe(self, region: RegionKey, num_bytes: int) -> int:
        """Move up to so many bytes to where they change nothing, as a write would. Returns how many, once they have arrived.
        Raises ReplicaLost or TransferError where the holder cannot be reached this way."""
        ...

    def ended(self, grant_id: str) -> None:
        """Note that nothing more will be written under this grant."""
        ...

    def forget(self, endpoint_owner: str) -> None:
        """Drop what was kept to reach the holder at this mail address, which is gone."""
        ...

    async def close(self) -> None: ...


def reachable(
    senders: Sequence[Sender], regions: Sequence[RegionKey]
) -> list[list[tuple[Sender, RegionKey]]]:
    """Return, for each rank of the holder, all ways to it in the senders' order. Raises TransferError."""
    ways: list[list[tuple[Sender, RegionKey]]] = []
    for rank in dict.fromkeys((region.rank, region.shard) for region in regions):
        pairs = [(s, r) for s in senders for r in regions if (r.rank, r.shard) == rank and s.reaches(r)]
        if not pairs:
            offered = ", ".join(sorted({region.transport for region in regions}))
            have = ", ".join(sender.name for sender in senders)
            raise TransferError(f"no common KV transport: decode offers {offered}, prefill has {have}")
        ways.append(pairs)
    return ways
