"""Every message between Baton's processes, in one list (what instances report is in `core/reports.py`).

frontend  -> scheduler   PlaceRequest, Finished, AskStatus, AskShares, LoadAdapter, UnloadAdapter, AdaptersUsed
scheduler -> frontend    PlaceReply, Rejected, Status, SharesGranted, AdapterChanged
frontend  -> decode      Submit, Cancel, FindStream, AttachReader, DetachReader, UsageNoted
frontend  -> worker      DropCache, HintSession
worker    -> frontend    Tokens, Failed, HandedOver, Leaving, CacheDropped, SessionHinted, StreamFound
decode    -> prefill     StartPrefill, Revoke
prefill   -> decode      ChunkDone, Commit, Drained, PrefillFailed
worker    -> scheduler   Register, LoadReport, NeedPrefill, Leaving, AdaptersHeld
scheduler -> decode      PrefillAssigned, Buddy
decode    -> decode      Replicas, ReplicasKept
scheduler -> scheduler   PlacedByPeer, ReleasedByPeer, PeerRequest, PeerBacklog, SharesTaken, LimitBookCopy; itself PeersChanged
scheduler <-> all        AdapterList, and those of `core/sleep_messages.py`
"""

from dataclasses import dataclass

from core.adapter_messages import (
    AdapterChanged,
    AdapterList,
    AdaptersHeld,
    AdaptersUsed,
    LoadAdapter,
    UnloadAdapter,
)
from core.kv import KVShard
from core.limit_messages import AskShares, LimitBookCopy, SharesGranted, SharesTaken
from core.reports import DroppedBlocks, LoadReport, Register, Status
from core.sleep_messages import SleepMessage
from core.stream_messages import AttachReader, DetachReader, FindStream, StreamFound, UsageNoted
from core.types import Request, Route, Slo, TokenOut


@dataclass(frozen=True, slots=True, kw_only=True)
class PlaceRequest:
    """Ask for a route. `exclude` names instances that this request has just lost."""

    request_id: str
    attempt: int
    num_tokens: int
    """Known tokens: prompt and what earlier attempts emitted."""
    max_new_tokens: int
    block_hashes: tuple[int, ...]
    """`core.kv.block_hashes` of the known tokens."""
    slo: Slo
    exclude: tuple[str, ...] = ()
    source: str = ""
    """An instance that has the KV of these tokens and should send it, in place of a prefill instance."""
    prefer: str = ""
    """The decode instance to take if it has room. The `source` itself: nothing needs to be sent there."""
    tenant: str = ""
    weight: float = 1.0
    """The tenant's share of the service, beside others'."""

    @property
    def ends_with_prompt(self) -> bool:
        """The step that computes its prompt samples all that is wanted: decode has no use for its KV. What is copied from a
        `source` is wanted for its KV."""
        return self.max_new_tokens <= 1 and not self.source


@dataclass(frozen=True, slots=True)
class PlaceReply:
    request_id: str
    attempt: int
    route: Route
    slo: Slo | None = None
    """The class by which it is served from now on. It may have less priority than the one that was asked for. None: that one."""


@dataclass(frozen=True, slots=True)
class Rejected:
    request_id: str
    attempt: int
    reason: str
    retry_after_s: float
    """0: never."""
    possible_ttft_s: float = 0.0
    """When an idle instance would give the first token, where that is why: no instance can keep the class's target."""
    asleep: bool = False
    """The model sleeps. `retry_after_s` is when it will be awake, and 0 where it does not wake up by itself."""


@dataclass(frozen=True, slots=True)
class Finished:
    """The frontend is done with this attempt (finished, cancelled or failed): its place is free again."""

    request_id: str
    attempt: int
    num_output_tokens: int = 0
    """What this attempt has generated."""
    complete: bool = False
    """The request has come to its own end."""


@dataclass(frozen=True, slots=True)
class Buddy:
    """Keep copies of your sealed blocks there. An empty address means that there is no buddy."""

    address: str


@dataclass(frozen=True, slots=True)
class Replica:
    """One block over all layers, by its digest (`block_digests`)."""

    digest: bytes
    content: bytes


@dataclass(frozen=True, slots=True)
class Replicas:
    blocks: tuple[Replica, ...]


@dataclass(frozen=True, slots=True)
class ReplicasKept:
    """The next batch may come."""

    num_blocks: int


@dataclass(frozen=True, slots=True)
class Leaving:
    """This instance takes no new work and will end; what runs here should go on elsewhere, and may fetch its KV from here."""

    address: str
    hung: bool = False
    """A rank or a step of it did not end, so it was given up. Nothing can be fetched from it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NeedPrefill:
    """A decode instance holds a reservation whose prefill instance was lost or failed; `num_tokens` are still missing."""

    request_id: str
    attempt: int
    epoch: int
    num_tokens: int
    lost: str


@dataclass(frozen=True, slots=True)
class PrefillAssigned:
    """Answer to NeedPrefill. An empty `prefill` means: compute the prompt yourself."""

    request_id: str
    attempt: int
    epoch: int
    prefill: str


@dataclass(frozen=True, slots=True)
class AskStatus:
    nonce: int


@dataclass(frozen=True, slots=True)
class DropCache:
    """Give up what is kept of requests that are over: no request that comes later finds it."""

    nonce: int


@dataclass(frozen=True, slots=True)
class CacheDropped:
    nonce: int
    blocks: DroppedBlocks


@dataclass(frozen=True, slots=True)
class HintSession:
    """A tenant's session is over (`release`), or its next turn is near: its KV is to be read back from lower tiers."""

    nonce: int
    tenant: str
    session: str
    release: bool


@dataclass(frozen=True, slots=True)
class SessionHinted:
    nonce: int
    known: bool
    """Whether a turn of the session has ended here, lately."""


@dataclass(frozen=True, slots=True)
class PeersChanged:
    """The schedulers that act at once with the scheduler `me`, as its process has found out."""

    me: str
    others: tuple[str, ...]
    num_spares: int = 0
    """The number of schedulers, `me` included, that are asked for places only once others are lost."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacedByPeer:
    """`scheduler` has placed a request, which takes this of its instances and of its tenant's share."""

    scheduler: str
    frontend: str
    place: PlaceRequest
    """The placement request, without its block hashes."""
    route: Route
    num_blocks: int
    compute_tokens: int
    """Tokens of the prompt that the prefill instance computes, or else the decode instance."""
    expected_tokens: float
    """Output, on average."""
    moved_tokens: int = 0
    """Tokens whose KV goes from the prefill instance to the decode instance."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReleasedByPeer:
    """What `scheduler` had placed is free again. The rest is as in Finished; an attempt that was lost has generated nothing."""

    scheduler: str
    request_id: str
    attempt: int
    num_output_tokens: int
    complete: bool


@dataclass(frozen=True, slots=True)
class PeerRequest:
    """What `scheduler` asks of the others for its waiting requests. They are to leave alone the instance that it `keeps` for one
    that finds no room (empty for none). And they are to hold back what is late on `timely_level` or below it, since there it has
    some that can still be in time (None where it has none)."""

    scheduler: str
    keeps: str
    timely_level: int | None


@dataclass(frozen=True, slots=True)
class PeerBacklog:
    """What waits for a place at a scheduler."""

    num_queued: int
    queued_tokens: int
    """Tokens of their prompts, cached or not."""


@dataclass(frozen=True, slots=True)
class Submit:
    request: Request
    route: Route


@dataclass(frozen=True, slots=True)
class Cancel:
    request_id: str
    attempt: int


@dataclass(frozen=True, slots=True)
class Tokens:
    """All tokens of one engine step that go to one frontend."""

    tokens: tuple[TokenOut, ...]


@dataclass(frozen=True, slots=True)
class HandoverTimes:
    """What the writer has measured in its own time, and the holder in its own."""

    transport: str = ""
    queue_s: float = 0.0
    """From the grant to the first step with the prompt."""
    first_byte_s: float = 0.0
    """From the grant to the end of the first write."""
    exposed_s: float = 0.0
    """From the Commit's arrival, with the first token, to that of the last byte: what the transfer adds to the time of the
    second token. 0 when the bytes were there first."""


@dataclass(frozen=True, slots=True)
class HandedOver:
    """This attempt's KV has come to decode."""

    request_id: str
    attempt: int
    num_bytes: int
    times: HandoverTimes


@dataclass(frozen=True, slots=True)
class Failed:
    """The worker gives this attempt up. `retryable`: another instance may succeed."""

    request_id: str
    attempt: int
    reason: str
    retryable: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class RegionKey:
    """How a writer reaches one decode rank's KV pool: by which transport, where, and what lies there."""

    transport: str
    endpoint: str
    name: str
    host: str
    shard: KVShard
    num_blocks: int
    content: bytes = b""
    """`kvtransfer.wire.KVContent`, packed: what the holder understands and holds; empty from releases before there was one."""
    rank: int = 0
    """Which of the holder's ranks this is; several may hold the same shard."""
    base_bytes: int = 0
    """Where this rank's pool begins in the memory that the endpoint names."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Grant:
    """The right to write the KV of tokens [first_token, first_token + num_tokens) into `block_ids` of the holder's pool.

    Valid for one (request attempt, epoch, holder incarnation). The blocks return to the holder's pool only after every byte that
    the writer's Commit announces, after its Drained or PrefillFailed, or after the writer's access was fenced."""

    id: str
    key: str
    epoch: int
    holder: str
    incarnation: str
    regions: tuple[RegionKey, ...]
    block_ids: tuple[int, ...]
    first_token: int
    """A multiple of the holder's block size."""
    num_tokens: int
    ttl_s: float
    """The writer drops the request when it could not start within this time."""
    room_tokens: int = 0
    """The writer may go on generating while its KV is on the way: `block_ids` hold the KV of so many output tokens, too."""


@dataclass(frozen=True, slots=True)
class StartPrefill:
    request: Request
    grant: Grant


@dataclass(frozen=True, slots=True)
class Revoke:
    grant_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkDone:
    """Every write of the chunk's tokens is done; `num_bytes` of them the holder could not count itself (shared memory)."""

    grant_id: str
    seq: int
    first_token: int
    num_tokens: int
    num_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Commit:
    """`num_bytes` in all are written or on their way, nothing more will be; `first` is the token that prefill sampled (and sent
    to the frontend). The grant ends when all of them have arrived."""

    grant_id: str
    num_chunks: int
    num_bytes: int
    first: TokenOut
    times: HandoverTimes = HandoverTimes()
    more: tuple[TokenOut, ...] = ()
    """Tokens that prefill went on to sample meanwhile (and sent), whose KV but the last one's is written as well."""


@dataclass(frozen=True, slots=True)
class Drained:
    """The writer will never write under this grant again."""

    grant_id: str


@dataclass(frozen=True, slots=True)
class PrefillFailed:
    """The writer gave up; it implies Drained."""

    grant_id: str
    reason: str


Message = (
    PlaceRequest | PlaceReply | AskStatus | Status | Rejected | Finished | Register | Leaving | LoadReport | NeedPrefill
    | PrefillAssigned | Submit | Cancel | FindStream | StreamFound | AttachReader | DetachReader | UsageNoted | Tokens
    | HandedOver | Failed | Buddy | Replicas | ReplicasKept | DropCache | CacheDropped | HintSession | SessionHinted
    | StartPrefill | Revoke | ChunkDone | Commit | Drained | PrefillFailed | PeersChanged | PlacedByPeer | ReleasedByPeer
    | PeerRequest | PeerBacklog | AdapterList | AdaptersHeld | AdaptersUsed | LoadAdapter | UnloadAdapter | AdapterChanged
    | AskShares | SharesGranted | SharesTaken | LimitBookCopy | SleepMessage
)  # fmt: skip
