"""Every message between Baton's processes. One list, so that the protocol can be read in one place.

frontend  -> scheduler   Place, Finished
scheduler -> frontend    Placed, Rejected
frontend  -> decode      Submit, Cancel
worker    -> frontend    Tokens, Failed, HandedOver, Leaving
decode    -> prefill     StartPrefill, Revoke
prefill   -> decode      ChunkDone, Commit, Drained, PrefillFailed
worker    -> scheduler   Register, LoadReport, NeedPrefill, Leaving
scheduler -> decode      PrefillAssigned, Buddy
decode    -> decode      Replicas, ReplicasKept
any       -> any         Ping, Pong
"""

from dataclasses import dataclass

from core.kv import KVShard
from core.steps import UNKNOWN_STEPS, StepModels
from core.types import Request, Route, Slo, TokenOut


# --- placing -------------------------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class Place:
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
    """The decode instance to take if it has room."""
    tenant: str = ""
    weight: float = 1.0
    """The tenant's share of the service, beside others'."""


@dataclass(frozen=True, slots=True)
class Placed:
    request_id: str
    attempt: int
    route: Route


@dataclass(frozen=True, slots=True)
class Rejected:
    request_id: str
    attempt: int
    reason: str
    retry_after_s: float


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
class Site:
    """Where a host stands, as far as it is known."""

    zone: str = ""
    rack: str = ""
    nvlink_domain: str = ""
    """Hosts with the same one reach each other's GPUs over NVLink."""
    nic_bytes_per_s: float = 0.0
    """0: unknown."""


@dataclass(frozen=True, slots=True)
class Register:
    """An instance introduces itself; it repeats this whenever it has (re)connected to a scheduler."""

    address: str
    incarnation: str
    prefills: bool
    decodes: bool
    host: str
    """Host identity: instances on one host can use shared memory."""
    block_size: int
    num_blocks: int
    max_batch_tokens: int
    max_num_seqs: int
    kv_token_bytes: int = 0
    """KV bytes of one token (`KVLayout.token_bytes`); 0: unknown, and moving KV here is taken to cost no link time."""
    sends: bool = False
    """A decode instance that hands the KV of prefixes it has cached to others, computing what is missing."""
    replicates: bool = False
    """It keeps copies of its sealed blocks with a buddy, and others' with itself."""
    site: Site = Site()


@dataclass(frozen=True, slots=True)
class Buddy:
    """Keep copies of your sealed blocks there; empty: there is nobody."""

    address: str


@dataclass(frozen=True, slots=True)
class Replica:
    """One block over all layers, by its digest (`engine.tiers.digests`)."""

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


@dataclass(frozen=True, slots=True)
class TierCounts:
    """Blocks of an instance's lower tiers since it began."""

    saved: int = 0
    host_hits: int = 0
    disk_hits: int = 0
    missed: int = 0
    """Thought to be there and not any more, or damaged."""


@dataclass(frozen=True, slots=True)
class WorkCounts:
    """What an instance has done since it began."""

    steps: int = 0
    computed_tokens: int = 0
    """In those steps, prompts and outputs together."""
    prefix_queried_tokens: int = 0
    """Known tokens of the sequences that came; of these the device's prefix cache had `prefix_hit_tokens`."""
    prefix_hit_tokens: int = 0
    preempted: int = 0
    grants: int = 0
    """Rights to write into its pool that it has given; `live_grants` are still open now."""
    live_grants: int = 0
    fences: int = 0
    """Writers that had to be shut out."""


@dataclass(frozen=True, slots=True)
class LayerExperts:
    """One layer's experts on an instance, or on all of them together."""

    layer: int
    imbalance: float
    """Of late: the load of the busiest of the ranks that share these experts, by the mean. Of several instances the largest."""
    counts: tuple[int, ...]
    """How often each was chosen."""


@dataclass(frozen=True, slots=True)
class LoadReport:
    address: str
    seq: int
    free_blocks: int
    """Blocks that can be had at once: unused ones and unreferenced prefix-cache blocks."""
    waiting_tokens: int
    """Prompt tokens still to be computed here."""
    num_waiting: int
    num_running: int
    tokens_per_s: float
    """Measured prompt-token rate of recent steps; 0 until there is a measurement."""
    step_s: float
    """Smoothed duration of recent steps."""
    cache_added: tuple[int, ...] = ()
    cache_removed: tuple[int, ...] = ()
    defect: str = ""
    """What the last idle self-check of the block accounting found wrong; empty: nothing."""
    tiers: TierCounts = TierCounts()
    num_decoding: int = 0
    """Of those that run: how many have their prompt computed."""
    context_tokens: int = 0
    """Known tokens of all that run."""
    received: tuple[str, ...] = ()
    """Attempts (`Request.key`) that have come here since the last report."""
    steps: StepModels = UNKNOWN_STEPS
    work: WorkCounts = WorkCounts()
    experts: tuple[LayerExperts, ...] = ()
    """Since the instance began. Empty: nothing new."""


@dataclass(frozen=True, slots=True)
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
class InstanceStatus:
    address: str
    prefills: bool
    decodes: bool
    num_blocks: int
    free_blocks: int
    num_waiting: int
    num_running: int
    defect: str
    tiers: TierCounts = TierCounts()
    steps: StepModels = UNKNOWN_STEPS
    """How long its steps take, and how well that is known."""
    work: WorkCounts = WorkCounts()
    leaving: bool = False
    queued_tokens: int = 0
    """Prompt tokens to be computed here, reported and promised."""
    tokens_per_s: float = 0.0
    step_s: float = 0.0
    expert_imbalance: tuple[tuple[int, float], ...] = ()
    """(layer, the load of the busiest of the ranks that share its experts by the mean)"""


@dataclass(frozen=True, slots=True)
class PoolStatus:
    """What the autoscaler makes of one pool."""

    pool: str
    wanted: int = 0
    """Instances that it shall have."""
    serving: int = 0
    num_grown: int = 0
    """How often it was made larger, and smaller, since the scheduler began."""
    num_shrunk: int = 0
    cold_start_s: float = 0.0
    reason: str = ""
    """Of the last change."""


@dataclass(frozen=True, slots=True)
class Status:
    """What the scheduler knows. `why_not`: why a request would not be answered now; empty: it would be."""

    nonce: int
    why_not: str
    num_queued: int
    instances: tuple[InstanceStatus, ...]
    experts: tuple[LayerExperts, ...] = ()
    """Over all instances."""
    pools: tuple[PoolStatus, ...] = ()
    """Where pools follow their load."""


# --- serving -------------------------------------------------------------------------------------------------------
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
    """What the writer has measured, in its own time, and the holder in its."""

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


# --- handing over --------------------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
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


@dataclass(frozen=True, slots=True)
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


@dataclass(frozen=True, slots=True)
class ChunkDone:
    """Every write of the chunk's tokens is done; `num_bytes` of them the holder could not count itself (shared memory)."""

    grant_id: str
    seq: int
    first_token: int
    num_tokens: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Commit:
    """`num_bytes` in all are written or on their way, nothing more will be; `first` is the token that prefill drew (and sent to
    the frontend). The grant ends when all of them have arrived."""

    grant_id: str
    num_chunks: int
    num_bytes: int
    first: TokenOut
    times: HandoverTimes = HandoverTimes()
    more: tuple[TokenOut, ...] = ()
    """Tokens that prefill went on to draw meanwhile (and sent), whose KV but the last one's is written as well."""


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
    Place | Placed | AskStatus | Status | Rejected | Finished | Register | Leaving | LoadReport | NeedPrefill | PrefillAssigned
    | Submit | Cancel | Tokens | HandedOver | Failed
    | Buddy | Replicas | ReplicasKept
    | StartPrefill | Revoke | ChunkDone | Commit | Drained | PrefillFailed
)  # fmt: skip
