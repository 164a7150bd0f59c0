"""What instances report of themselves, and the scheduler of them: parts of the protocol in `core/messages.py`."""

from collections.abc import Sequence
from dataclasses import dataclass

from core.cost.steps import UNKNOWN_STEPS, StepModels
from core.sleep_messages import Asleep

_LOADING = ("reading", "packing")
"""The phases of a start in which weights come from their files (`models/registry.py`)."""


@dataclass(frozen=True, slots=True)
class Site:
    """Where a host stands, as far as it is known."""

    zone: str = ""
    rack: str = ""
    nvlink_domain: str = ""
    """Hosts with the same one reach each other's GPUs over NVLink."""
    nic_bytes_per_s: float = 0.0
    """0 where it is unknown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StartTimes:
    """How long an instance, or a rank, has taken to start."""

    phases: tuple[tuple[str, float], ...] = ()
    """(name, seconds), which add up to the whole; those of the slowest of several ranks. Empty where nobody has timed them."""
    bytes_read: int = 0
    """Bytes of weights that were read, by all ranks together."""

    @property
    def whole_s(self) -> float:
        return sum(seconds for _, seconds in self.phases)

    @property
    def read_bytes_per_s(self) -> float:
        """Return the rate at which weights were read and packed; 0 where none were.

        A mapped file's pages come from the disk when its matrices are packed: reading alone has no rate."""
        loading_s = sum(seconds for phase, seconds in self.phases if phase in _LOADING)
        return self.bytes_read / loading_s if loading_s else 0.0

    def summary(self) -> str:
        """Return a clause for people: the whole, each phase, and what was read."""
        phases = ", ".join(f"{phase} {seconds:.2f}" for phase, seconds in self.phases)
        size, rate = self.bytes_read / 1e6, self.read_bytes_per_s / 1e6
        return f"{self.whole_s:.2f} s ({phases}); {size:,.1f} MB of weights were read and packed at {rate:,.1f} MB/s"


def of_all_ranks(ranks: Sequence[StartTimes]) -> StartTimes:
    """Return the times of the rank that took longest, with the bytes of all."""
    slowest = max(ranks, key=lambda rank: rank.whole_s)
    return StartTimes(phases=slowest.phases, bytes_read=sum(rank.bytes_read for rank in ranks))


@dataclass(frozen=True, slots=True, kw_only=True)
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
    num_groups: int = 1
    """Groups of ranks, each with as many of the blocks. A sequence is served by one of them."""
    answers: bool = False
    """It answers requests of which nothing follows the step that computes their prompt, also where it does not decode."""
    reports_links: bool = False
    """Its reports say which attempts' KV has left (`LoadReport.sent`), so that its links can be reserved until then."""
    state_blocks: int = 0
    """Blocks that each sequence takes for its recurrent state, before those of its tokens (`KVLayout.state_blocks`)."""
    overcommit_blocks: int = 0
    """As many blocks more than its pool has its sequences may hold together, since some of them sit out
    (`core.pacing.overcommit`)."""
    card: str = ""
    """The GPU that it shares with others, with which it is lost; empty where it has its own."""
    start: StartTimes = StartTimes()
    """How long it has taken to start."""

    @property
    def capacity_tokens(self) -> int:
        """Tokens of one sequence at the most."""
        return (self.num_blocks // self.num_groups - self.state_blocks) * self.block_size


@dataclass(frozen=True, slots=True)
class TierCounts:
    """Blocks of an instance's lower tiers since it began."""

    saved: int = 0
    host_hits: int = 0
    disk_hits: int = 0
    missed: int = 0
    """Blocks that were looked for and are not there any more, or are damaged."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DroppedBlocks:
    """What an instance has given up of its prefix cache, in blocks."""

    device: int
    host: int = 0
    disk: int = 0
    in_use: int = 0
    """Blocks of the device that stay, since something that runs has them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionCounts:
    """What an instance has done by what clients say of the time after their requests (`core.types.CacheHints`)."""

    pinned_blocks: int = 0
    """Blocks that are pinned now."""
    cut: int = 0
    """Pins that ended before their time, so that tenants keep to their parts."""
    prefetched: int = 0
    """Sessions that were read back from lower tiers before their next turn."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkCounts:
    """What an instance has done since it began."""

    steps: int = 0
    computed_tokens: int = 0
    """In those steps, prompts and outputs together."""
    prefix_queried_tokens: int = 0
    """Known tokens of the sequences that came; of these the device's prefix cache had `prefix_hit_tokens`."""
    prefix_hit_tokens: int = 0
    preempted: int = 0
    """Times that a sequence lost its blocks to others; `returned` times its KV was read back from a lower tier then."""
    returned: int = 0
    grants: int = 0
    """Rights to write into its pool that it has given; `live_grants` are still open now."""
    live_grants: int = 0
    fences: int = 0
    """Writers that had to be shut out."""
    replayed_steps: int = 0
    """Steps that were replayed from CUDA graphs."""
    draft_tokens: int = 0
    """Draft tokens that steps have computed; `accepted_tokens` of them were right."""
    accepted_tokens: int = 0
    out_of_memory_steps: int = 0
    """Steps for which there was no memory, and that were planned again with less."""
    sessions: SessionCounts = SessionCounts()


@dataclass(frozen=True, slots=True)
class LayerExperts:
    """One layer's experts on an instance, or on all of them together."""

    layer: int
    imbalance: float
    """The recent load of the busiest of the ranks that share these experts, by the mean; the largest of several instances."""
    counts: tuple[int, ...]
    """How often each was chosen."""
    num_moves: int = 0
    """Experts that were put into other slots, so far."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkSpeed:
    """How fast KV has lately gone from the instance that reports to another one."""

    receiver: str
    transport: str
    bytes_per_s: float
    latency_s: float = 0.0
    """What each write takes whatever its size."""


@dataclass(frozen=True, slots=True, kw_only=True)
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
    """The measured prompt-token rate of recent steps; 0 where there were none."""
    step_s: float
    """Smoothed duration of recent steps."""
    cache_added: tuple[int, ...] = ()
    cache_removed: tuple[int, ...] = ()
    defect: str = ""
    """What the last idle self-check of the block accounting found wrong; empty where it found nothing."""
    tiers: TierCounts = TierCounts()
    num_decoding: int = 0
    """Running sequences whose prompt is computed."""
    context_tokens: int = 0
    """Known tokens of all that run."""
    received: tuple[str, ...] = ()
    """Attempts (`Request.key`) that have come here since the last report."""
    steps: StepModels = UNKNOWN_STEPS
    work: WorkCounts = WorkCounts()
    experts: tuple[LayerExperts, ...] = ()
    """Counts since the instance began; empty where nothing is new."""
    waiting_by_priority: tuple[tuple[int, int], ...] = ()
    """(priority, prompt tokens still to be computed) of each class that is here, the lowest first."""
    late_tokens: int = 0
    """Prompt tokens still to be computed of prompts that are late, which let others of their class pass."""
    pausable_blocks: int = 0
    """Blocks of sequences that are so far ahead of their pace that others may have them at once (`core.pacing.overcommit`)."""
    links: tuple[LinkSpeed, ...] = ()
    """How fast KV goes to each instance to which some has gone lately."""
    sent: tuple[str, ...] = ()
    """Attempts whose KV has left for another instance since the last report, or will never leave."""
    grown: tuple[tuple[str, int], ...] = ()
    """(attempt, output tokens) of outputs that have come to a length of `core.output_marks` since the last report."""


@dataclass(frozen=True, slots=True, kw_only=True)
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
    """Prompt tokens to be computed here, reported and reserved."""
    tokens_per_s: float = 0.0
    step_s: float = 0.0
    expert_imbalance: tuple[tuple[int, float], ...] = ()
    """(layer, the load of the busiest of the ranks that share its experts by the mean)"""
    expert_moves: int = 0
    """Experts that were put into other slots, in all layers."""
    start: StartTimes = StartTimes()
    """How long it has taken to start."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolStatus:
    """How large one pool shall be, and what the autoscaler has decided, where there is one."""

    pool: str
    wanted: int = 0
    """The number of instances that it shall have."""
    serving: int = 0
    num_grown: int = 0
    """How often it was made larger, and smaller, since the scheduler began."""
    num_shrunk: int = 0
    cold_start_s: float = 0.0
    """0 where its size does not follow its load."""
    reason: str = ""
    """Why the size changed last."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Status:
    """What the scheduler knows. `why_not` says why a request would not be answered now; it is empty where it would be."""

    nonce: int
    why_not: str
    num_queued: int
    instances: tuple[InstanceStatus, ...]
    experts: tuple[LayerExperts, ...] = ()
    """The experts of all instances together."""
    pools: tuple[PoolStatus, ...] = ()
    """Empty until their sizes have been asked for."""
    num_hung: int = 0
    """The instances that were given up because a rank or a step did not end, since the scheduler began."""
    sleepers: tuple[Asleep, ...] = ()
    """The instances that sleep, fall asleep or wake up."""
