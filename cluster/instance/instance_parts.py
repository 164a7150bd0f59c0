"""What an instance is made of: the parts in which a real one and a modelled one differ, and how the rest is built from them."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Literal, Protocol, TypeVar

from cluster.instance.remote_memory.remote_host import RemoteHost
from core.config.cluster_config import ClusterConfig
from core.config.draft_config import engine_of_role
from core.cost.steps import UNKNOWN_STEPS, StepModels
from core.errors import Bug
from core.kv import KVShard, RankPool
from core.messages import Commit
from core.pacing.overcommit import overcommit_blocks
from core.plan import StepPlan
from core.ports import Clock, LayerDone, LayerSink, Mail, SchedulerPolicy, WorkerGroup
from core.reports import Register, Site
from core.request_checks import ANY_TOKEN
from core.scheduler_tuning import tuned
from core.sleep_messages import SleepLevel
from core.start_timer import StartTimer
from decode.headroom_policy import HeadroomPolicy
from decode.replicas import Replicator
from engine.loop import Engine
from engine.planning.dp_scheduler import make_planner
from engine.planning.planner_protocol import Planner
from engine.planning.sequence import Sequence
from engine.planning.step_bounds import StepBounds
from engine.planning.step_time_fit import StepFits
from engine.tiers.restoring import Restoring
from engine.tiers.tier_store import TierStore
from kvtransfer.inbox import Inbox
from kvtransfer.pusher import Pusher
from kvtransfer.source import Source
from kvtransfer.staging import Staging
from kvtransfer.transport.base import Receiver, Sender
from prefill.deadline_policy import DeadlinePolicy

Role = Literal["prefill", "decode", "both"]


class SleepingParts(Protocol):
    """What of an instance outlives its sleep. Both methods block, and are for any thread."""

    def sleep(self, level: SleepLevel, *, keeps_kv: bool) -> SleepLevel:
        """Give back what a sleeping instance does not keep, after it was closed. `keeps_kv`: the KV in host memory stays. Returns
        the level that it sleeps at, which may be a lower one."""
        ...

    def wake(self, loop: asyncio.AbstractEventLoop) -> "InstanceParts":
        """Return the parts of an instance anew, for `loop`."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class InstanceParts:
    """The parts in which a real instance and a modelled one differ."""

    shard: KVShard
    num_blocks: int
    max_context_tokens: int
    make_receivers: Callable[[Inbox], list[Receiver]]
    make_senders: Callable[[], list[Sender]]
    make_group: Callable[[LayerSink | None], WorkerGroup]
    host: str
    source: Source | None = None
    """How senders read the pool. None means that it is where they read."""
    staging: Staging | None = None
    """Where KV is converted for holders that store it otherwise. None means that those are refused."""
    tiers: TierStore | None = None
    """Where KV goes that the pool has no room for."""
    model: str = ""
    """The weights' revision. Both sides of a hand-over must have the same. An empty one is not compared."""
    site: Site = field(default_factory=Site)
    pools: tuple[RankPool, ...] = ()
    """The ranks' pools. None means one rank, which has all of `shard`."""
    steps: StepModels = UNKNOWN_STEPS
    """How long steps take, as far as it is known before the first one."""
    compiles: bool = False
    """Kernels are compiled when steps first use them."""
    num_groups: int = 1
    """The number of groups of ranks that serve sequences of their own, each with as many of the blocks."""
    encodes: bool = False
    """The model is an encoder: a prompt is computed in one step, and nothing of it is kept."""
    remote: tuple[RemoteHost, ...] = ()
    """The other hosts that its ranks are on."""
    card: str = ""
    """The GPU that it shares with an instance of another role; empty where it has its own."""
    adapters: frozenset[str] = frozenset()
    """The adapters that its ranks have from the start, by name and revision."""
    vocab_size: int = ANY_TOKEN
    """The number of tokens that the model has rows for. A request with another one is refused."""
    timer: StartTimer | None = None
    """What times the start; None for a modelled one."""
    kept: SleepingParts | None = None
    """What has it sleep and wake up; None: it cannot."""


@dataclass(frozen=True, slots=True)
class AsleepParts:
    """What an instance has that begins asleep: nothing has been read yet."""

    kept: SleepingParts
    site: Site = field(default_factory=Site)


class LateSink:
    """A LayerSink for ranks that are made before the one that learns of their layers."""

    sink: LayerSink | None = None

    def step_started(self, plan: StepPlan) -> LayerDone | None:
        return None if self.sink is None else self.sink.step_started(plan)


P = TypeVar("P", InstanceParts, InstanceParts | AsleepParts)


async def made_aside(make: Callable[[], P]) -> P:
    """Return parts, made on a thread with their group, so that the event loop serves meanwhile."""
    made, late = await asyncio.to_thread(make), LateSink()
    if isinstance(made, AsleepParts):
        return made
    group = await asyncio.to_thread(made.make_group, late)

    def take_group(sink: LayerSink | None) -> WorkerGroup:
        late.sink = sink
        return group

    return replace(made, make_group=take_group)


def make_scheduler(config: ClusterConfig, role: Role, parts: InstanceParts) -> Planner:
    """Return the scheduler: prompts by their deadlines where nothing decodes; elsewhere in what the decoding sequences' targets
    leave."""
    tuning = tuned(config.schedule.tuning)
    policy: SchedulerPolicy[Sequence] = (
        DeadlinePolicy(tuning) if role == "prefill" else HeadroomPolicy(tuning)
    )
    return make_planner(
        engine_of_role(config.engine, role),
        parts.num_blocks,
        parts.max_context_tokens,
        policy,
        parts.num_groups,
        whole_prompts=parts.encodes,
        num_state_blocks=parts.shard.layout.state_blocks,
    )


def make_pusher(mail: Mail, clock: Clock, parts: InstanceParts) -> Pusher:
    return Pusher(
        parts.shard,
        parts.num_blocks,
        mail,
        parts.make_senders(),
        source=parts.source,
        staging=parts.staging,
        model=parts.model,
        pools=parts.pools,
        now=clock.now,
        remote_senders=[host.senders for host in parts.remote],
        remote_staging=[host if host.converts else None for host in parts.remote],
    )


def make_engine(
    config: ClusterConfig, scheduler: Planner, pusher: Pusher, clock: Clock, parts: InstanceParts
) -> Engine:
    tiers, engine = parts.tiers, config.engine
    grace_s = engine.step_grace_s or config.mail.peer_timeout_s
    return Engine(
        scheduler,
        parts.make_group(pusher),
        clock,
        lookahead=engine.lookahead,
        tiers=Restoring(scheduler.prefixes, tiers, engine.block_size, parts.shard.layout.state_blocks)
        if tiers
        else None,
        fits=StepFits(parts.steps),
        vocab_size=parts.vocab_size,
        bounds=StepBounds(grace_s, compiles=parts.compiles),
        held_up=lambda: pusher.room.is_awaited,
    )


def make_inbox(
    address: str,
    parts: InstanceParts,
    on_complete: Callable[[Commit], None],
    on_corrupted: Callable[[str], None],
) -> Inbox:
    """Return the inbox, with its receivers, ready for what the ranks' other hosts receive."""
    inbox = Inbox(
        parts.shard,
        parts.num_blocks,
        address,
        address,
        on_complete=on_complete,
        on_corrupted=on_corrupted,
        model=parts.model,
        pools=parts.pools,
        remote=parts.remote,
    )
    inbox.attach(parts.make_receivers(inbox))
    for host in parts.remote:
        host.run(inbox.arrived, inbox.corrupted)
    return inbox


def run_without_inbox(parts: InstanceParts) -> None:
    """Run the other hosts of an instance that gets no KV. Bytes that reach one of them are a Bug."""
    for host in parts.remote:
        host.run(_nobody_writes, _nobody_writes)


def make_replicator(
    config: ClusterConfig, role: Role, mail: Mail, clock: Clock, parts: InstanceParts
) -> Replicator | None:
    """Return the replicator, or None where no copies of sealed blocks are kept."""
    if role == "prefill" or not _replicates(config, parts) or parts.tiers is None:
        return None
    return Replicator(mail, clock, parts.tiers)


def registration(config: ClusterConfig, role: Role, address: str, parts: InstanceParts) -> Register:
    engine = config.engine
    return Register(
        address=address,
        incarnation=address,
        prefills=role != "decode",
        decodes=role != "prefill",
        host=parts.host,
        block_size=engine.block_size,
        num_blocks=parts.num_blocks,
        max_batch_tokens=engine.max_batch_tokens * parts.num_groups,
        max_num_seqs=engine.max_num_seqs * parts.num_groups,
        kv_token_bytes=parts.shard.layout.token_bytes,
        sends=True,
        replicates=_replicates(config, parts),
        site=parts.site,
        num_groups=parts.num_groups,
        answers=True,
        reports_links=True,
        state_blocks=parts.shard.layout.state_blocks,
        overcommit_blocks=_overcommit_blocks(config, parts),
        card=parts.card,
    )


def _overcommit_blocks(config: ClusterConfig, parts: InstanceParts) -> int:
    if parts.tiers is None or not config.engine.longest_pause_s or parts.shard.layout.state_blocks:
        return 0
    return overcommit_blocks(parts.num_blocks, parts.tiers.num_host_blocks, tuned(config.schedule.tuning))


def _replicates(config: ClusterConfig, parts: InstanceParts) -> bool:
    return bool(config.transfer.kv_replicas) and parts.tiers is not None


def _nobody_writes(grant_id: str, num_bytes: int = 0) -> None:
    raise Bug(f"bytes have arrived at a prefill instance, under grant {grant_id}")
