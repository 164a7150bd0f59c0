"""Messages between an instance and the server of its memory on another host or on a GPU, in frames as between it and its ranks.

The memory server gets a MemorySetup, then commands, which take effect in their order. It sends MemoryReady, then BytesArrived and
Corrupted as they happen, and one Answer to each command that has a number."""

from dataclasses import dataclass

from core.kv import RankPool
from core.messages import RegionKey
from engine.ranks.rank_messages import MemoryPlace


@dataclass(frozen=True, slots=True, kw_only=True)
class MemorySetup:
    memory: int
    """The number of the memory within the instance, from 1 on."""
    address: str
    """The instance's mail address, by which holders and writers know whose streams these are."""
    incarnation: str
    receives: bool
    """Whether others write into it."""
    host: str
    """Where the memory server is to listen."""
    pools: tuple[RankPool, ...]
    """The pools that lie in it."""
    device: str = ""
    """The device whose memory it is, as torch names it; empty: the host's."""
    exchange_blocks: int = 0
    """How many blocks have room in host memory that it shares with its instance, for lower tiers. 0: there are none."""


@dataclass(frozen=True, slots=True)
class RemoteEndpoint:
    """One of the memory server's senders."""

    name: str
    vouches: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryReady:
    memory: MemoryPlace
    """How ranks reach it."""
    host: str
    """The host's identity, as in RegionKey."""
    regions: tuple[tuple[RegionKey, ...], ...]
    """The regions of each pool, in the order of the setup."""
    ways: tuple[RemoteEndpoint, ...]
    converts: bool = False
    """Whether it does RemoteConvert."""
    exchange: MemoryPlace | None = None
    """The host memory that it shares with its instance, if the setup asks for any."""


@dataclass(frozen=True, slots=True)
class MemoryFailed:
    reason: str


@dataclass(frozen=True, slots=True)
class Open:
    grant_id: str
    blocks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class RefuseGrant:
    grant_id: str


@dataclass(frozen=True, slots=True)
class Ended:
    """A grant has ended. This is for the receivers."""

    grant_id: str


@dataclass(frozen=True, slots=True)
class Sent:
    """Bytes of a grant were sent. This is for the senders."""

    grant_id: str


@dataclass(frozen=True, slots=True)
class Forget:
    """A holder is gone. This is for the senders."""

    owner: str


@dataclass(frozen=True, slots=True)
class Sync:
    """Answered at once, when everything before it has taken effect."""

    number: int


@dataclass(frozen=True, slots=True)
class WhenIdle:
    number: int
    grant_id: str


@dataclass(frozen=True, slots=True)
class Fence:
    number: int
    writer: str
    grant_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteWrite:
    number: int
    way: int
    grant_id: str
    region: RegionKey
    sources: tuple[int, ...]
    destinations: tuple[int, ...]
    sizes: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteConvert:
    """Convert vectors of a pool for a holder that stores them otherwise, and write them. Answered with the bytes sent."""

    number: int
    way: int
    grant_id: str
    region: RegionKey
    pool: RankPool
    sources: tuple[int, ...]
    destinations: tuple[int, ...]
    counts: tuple[int, ...]
    """The vectors of each run (`kvtransfer/copies.py`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveBytes:
    """Copy ranges of the memory into the exchange, one behind the other. Answered when they are there."""

    number: int
    starts: tuple[int, ...]
    sizes: tuple[int, ...]
    destination: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RestoreBytes:
    """Copy ranges into the memory, which lie one behind the other in the exchange. Answered when they are there."""

    number: int
    starts: tuple[int, ...]
    sizes: tuple[int, ...]
    source: int


@dataclass(frozen=True, slots=True)
class Probe:
    number: int
    way: int
    region: RegionKey
    num_bytes: int


@dataclass(frozen=True, slots=True)
class BytesArrived:
    grant_id: str
    num_bytes: int


@dataclass(frozen=True, slots=True)
class BytesCarried:
    """What `Sender.carried` says after a RemoteWrite, before its Answer."""

    way: int
    endpoint: str
    num_bytes: int
    busy_s: float


@dataclass(frozen=True, slots=True)
class Corrupted:
    grant_id: str


@dataclass(frozen=True, slots=True)
class Answer:
    number: int
    value: int = 0
    error: str = ""
    lost: bool = False
    """Whether the error is ReplicaLost; otherwise it is a TransferError."""


TO_MEMORY = {
    kind.__name__: kind
    for kind in (
        MemorySetup,
        Open,
        RefuseGrant,
        Ended,
        Sent,
        Forget,
        Sync,
        WhenIdle,
        Fence,
        RemoteWrite,
        RemoteConvert,
        SaveBytes,
        RestoreBytes,
        Probe,
    )
}
FROM_MEMORY = {
    kind.__name__: kind for kind in (MemoryReady, MemoryFailed, BytesArrived, BytesCarried, Corrupted, Answer)
}
