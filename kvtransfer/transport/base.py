"""The seam between hand-over and transports.

The holder of the blocks has a Receiver for each way in which it can be reached, the writer one Sender for each way in which it
can write. A transport never decides whether a write is allowed: the Receiver asks, or the writer's process is trusted for as
long as it lives (shared memory) and fenced by its death."""

from collections.abc import Callable, Sequence
from typing import Protocol

from core.errors import TransferError
from core.kv import KVShard
from core.messages import RegionKey
from kvtransfer.copies import CopyRun

MayWrite = Callable[[str, int, int], bool]
"""(grant id, first byte, end byte) -> is this write covered by a live grant?"""
Arrived = Callable[[str, int], None]
"""(grant id, bytes): so many more bytes of a grant are in the pool."""

PROBE = "\0probe"
"""In place of a grant: bytes that the holder drops and answers, so that a writer can measure the way to it."""


class Holder(Protocol):
    """Who is asked about a write, and told of it."""

    @property
    def may_write(self) -> MayWrite: ...
    @property
    def arrived(self) -> Arrived: ...
    @property
    def corrupted(self) -> Callable[[str], None]:
        """(grant id): bytes of it have arrived damaged, twice."""
        ...


class Receiver(Protocol):
    def region(self, shard: KVShard, num_blocks: int) -> RegionKey: ...
    def when_idle(self, grant_id: str, then: Callable[[], None]) -> None:
        """Calls `then` once no write under this grant is half done: at once where there is none."""
        ...

    def ended(self, grant_id: str) -> None:
        """The grant's writer is done with it: drop what was kept for it. For any grant, also an unknown one."""
        ...

    async def fence(self, writer: str, grant_id: str) -> None:
        """Returns once nothing that `writer` (its mail address) may still do under this grant can change the pool.

        The grant is refused already."""
        ...

    async def close(self) -> None: ...


class Sender(Protocol):
    name: str
    vouches: bool
    """The Receiver cannot count these bytes: ChunkDone must say how many were written."""

    def reaches(self, region: RegionKey) -> bool: ...
    async def write(self, grant_id: str, region: RegionKey, runs: Sequence[CopyRun]) -> None:
        """Returns when the source may be reused. Raises ReplicaLost, or TransferError when the holder cannot take these runs.

        With checksums, also not before the holder has found them right; what arrived damaged is sent once more."""
        ...

    async def probe(self, region: RegionKey, num_bytes: int) -> int:
        """Move up to so many bytes to where they change nothing, as a write would; returns how many, once they have arrived.

        Raises ReplicaLost or TransferError where the holder cannot be reached this way."""
        ...

    def ended(self, grant_id: str) -> None:
        """Nothing more will be written under this grant."""
        ...

    def forget(self, endpoint_owner: str) -> None:
        """The holder at this mail address is gone: drop what was kept to reach it."""
        ...

    async def close(self) -> None: ...


def reachable(
    senders: Sequence[Sender], regions: Sequence[RegionKey]
) -> list[list[tuple[Sender, RegionKey]]]:
    """For each rank of the holder all ways to it, in the senders' order. Raises TransferError."""
    ways: list[list[tuple[Sender, RegionKey]]] = []
    for rank in dict.fromkeys((region.rank, region.shard) for region in regions):
        pairs = [(s, r) for s in senders for r in regions if (r.rank, r.shard) == rank and s.reaches(r)]
        if not pairs:
            offered = ", ".join(sorted({region.transport for region in regions}))
            have = ", ".join(sender.name for sender in senders)
            raise TransferError(f"no common KV transport: decode offers {offered}, prefill has {have}")
        ways.append(pairs)
    return ways
