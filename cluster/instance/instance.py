"""One instance: its engine, its roles' workers, its transports, and their life together in one process."""

import asyncio
import contextlib
import logging
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Literal

from cluster.instance.remote_memory.remote_host import RemoteHost
from cluster.instance.reporting import Reporter
from core.config import ClusterConfig
from core.errors import Bug
from core.kv import KVShard, RankPool
from core.messages import Failed, Leaving, Message, PrefillFailed, StartPrefill, Submit
from core.ports import Clock, LayerSink, Mail, Resolve, SchedulerPolicy, WorkerGroup
from core.reports import Register, Site, WorkCounts
from core.steps import UNKNOWN_STEPS, StepModels
from core.types import TokenOut
from decode.decode_worker import DecodeWorker
from decode.headroom_policy import HeadroomPolicy
from decode.replicas import Replicator
from engine.loop import Engine
from engine.planning.dp_scheduler import make_planner
from engine.planning.sequence import Sequence
from engine.planning.step_time_fit import StepFits
from engine.tiers.layer_gate import GatedSink, LayerGate
from engine.tiers.restoring import Restoring
from engine.tiers.tier_store import TierStore
from kvtransfer.inbox import Inbox
from kvtransfer.pusher import Pusher
from kvtransfer.staging import Staging
from kvtransfer.transport.base import Receiver, Sender
from prefill.deadline_policy import DeadlinePolicy
from prefill.prefill_worker import PrefillWorker

log = logging.getLogger(__name__)

Role = Literal["prefill", "decode", "both"]


@dataclass(frozen=True, slots=True, kw_only=True)
class InstanceParts:
    """What differs between a real instance and a modelled one."""

    shard: KVShard
    num_blocks: int
    max_context_tokens: int
    make_receivers: Callable[[Inbox], list[Receiver]]
    make_senders: Callable[[], list[Sender]]
    make_group: Callable[[LayerSink | None], WorkerGroup]
    host: str
    staging: Staging | None = None
    """Where KV is converted for holders that store it otherwise; None: those are refused."""
    tiers: TierStore | None = None
    """Where KV goes that the pool has no room for."""
    gate: LayerGate | None = None
    """For ranks that ask their sink before a layer reads the pool. Else a prefix from the tiers is there before its step."""
    model: str = ""
    """The weights' revision; both sides of a hand-over must have the same. Empty: not compared."""
    site: Site = field(default_factory=Site)
    pools: tuple[RankPool, ...] = ()
    """The ranks' pools; none: there is one rank, which has all of `shard`."""
    steps: StepModels = UNKNOWN_STEPS
    """How long steps take, as far as it is known before the first."""
    num_groups: int = 1
    """Groups of ranks that serve sequences of their own, each with as many of the blocks."""
    remote: tuple[RemoteHost, ...] = ()
    """Beside this one the hosts that its ranks are on."""


class Instance:
    """`start` returns it running; `close` gives everything back. `failure` is set once the engine has stopped by itself."""

    def __init__(
        self,
        config: ClusterConfig,
        role: Role,
        mail: Mail,
        clock: Clock,
        resolve: Resolve,
        parts: InstanceParts,
    ) -> None:
        self.role: Role = role
        self.failure: BaseException | None = None
        self.address = mail.address
        self._config, self._mail, self._clock = config, mail, clock
        self._draining = False
        policy: SchedulerPolicy[Sequence] = DeadlinePolicy() if role == "prefill" else HeadroomPolicy()
        self._scheduler = make_planner(
            config.engine, parts.num_blocks, parts.max_context_tokens, policy, parts.num_groups
        )
        self._pusher = Pusher(
            parts.shard,
            parts.num_blocks,
            mail,
            parts.make_senders(),
            staging=parts.staging,
            model=parts.model,
            pools=parts.pools,
            now=clock.now,
            remote_senders=[host.senders for host in parts.remote],
        )
        self._remote = parts.remote
        tiers, gate, size = parts.tiers, parts.gate, config.engine.block_size
        group = parts.make_group(GatedSink(gate, self._pusher) if tiers and gate else self._pusher)
        self._engine = Engine(
            self._scheduler,
            group,
            clock,
            self._on_tokens,
            on_error=self._on_error,
            on_stuck=lambda keys: self._prefill.on_stuck(keys),
            lookahead=config.engine.lookahead,
            tiers=Restoring(self._scheduler, tiers, size, gate) if tiers else None,
            fits=StepFits(parts.steps),
        )
        info = Register(
            address=mail.address,
            incarnation=mail.address,
            prefills=role != "decode",
            decodes=role != "prefill",
            host=parts.host,
            block_size=config.engine.block_size,
            num_blocks=parts.num_blocks,
            max_batch_tokens=config.engine.max_batch_tokens * parts.num_groups,
            max_num_seqs=config.engine.max_num_seqs * parts.num_groups,
            kv_token_bytes=parts.shard.layout.token_bytes,
            sends=True,
            replicates=bool(config.transfer.kv_replicas) and parts.tiers is not None,
            site=parts.site,
            num_groups=parts.num_groups,
        )
        self._reporter = Reporter(
            info,
            self._engine,
            mail,
            clock,
            resolve=resolve,
            num_schedulers=config.serve.schedulers,
            interval_s=config.schedule.report_interval_s,
            check=self.check_integrity,
            count=self._counts,
        )
        self._prefill = PrefillWorker(mail, self._pusher)
        """Also of a decode instance: it sends what it has when its requests move away."""
        self._prefill.engine = self._engine
        self._decode: DecodeWorker | None = None
        self._inbox: Inbox | None = None
        self._replicator: Replicator | None = None
        if role == "prefill":
            for host in parts.remote:
                host.run(_nobody_writes, _nobody_writes)
        else:
            self._make_decode(parts)
            if config.transfer.kv_replicas and parts.tiers is not None:
                self._replicator = Replicator(mail, clock, parts.tiers)
        self._tasks: list[asyncio.Task[None]] = []

    def _make_decode(self, parts: InstanceParts) -> None:
        inbox = self._inbox = Inbox(
            parts.shard,
            parts.num_blocks,
            self._mail.address,
            self._mail.address,
            on_complete=lambda commit: worker.on_complete(commit),
            on_corrupted=lambda grant_id: worker.on_corrupted(grant_id),
            model=parts.model,
            pools=parts.pools,
            remote=parts.remote,
        )
        inbox.attach(parts.make_receivers(inbox))
        for host in parts.remote:
            host.run(inbox.arrived, inbox.corrupted)
        worker = self._decode = DecodeWorker(
            self._mail, self._clock, inbox, self._config.transfer, self._reporter
        )
        worker.engine = self._engine

    def run(self) -> None:
        """Begin to serve."""
        self._mail.listen(self._on_message, self._on_lost)
        self._tasks = [asyncio.create_task(self._engine.run()), asyncio.create_task(self._reporter.run())]
        if self._replicator is not None:
            self._tasks.append(asyncio.create_task(self._replicator.run()))

    @property
    def num_jobs(self) -> int:
        return self._prefill.num_jobs + (self._decode.num_jobs if self._decode else 0)

    @property
    def num_used_blocks(self) -> int:
        return self._scheduler.num_used_blocks

    @property
    def num_grants(self) -> int:
        """Rights to write into this instance's pool that somebody has."""
        return self._inbox.num_live if self._inbox else 0

    def check_integrity(self) -> None:
        """Raises Bug where the block accounting or the grants disagree with themselves."""
        self._engine.check_integrity()
        if self._inbox is not None:
            self._inbox.check_integrity()

    def _counts(self) -> WorkCounts:
        counts, inbox = self._engine.work_counts(), self._inbox
        if inbox is None:
            return counts
        return replace(counts, grants=inbox.num_granted, live_grants=inbox.num_live, fences=inbox.num_fenced)

    async def drain(self, timeout_s: float) -> None:
        """Refuse new work, have what is here go on elsewhere or finish, for at most `timeout_s`."""
        self._draining = True
        self._reporter.leave()
        for frontend in self._decode.frontends if self._decode else ():
            self._mail.send(frontend, Leaving(self.address))
        deadline = self._clock.now() + timeout_s
        while self.num_jobs and self._clock.now() < deadline:
            await self._clock.sleep(0.05)

    async def close(self) -> None:
        await self._mail.close()
        for task in self._tasks:
            task.cancel()
        for task in self._tasks:
            with contextlib.suppress(asyncio.CancelledError):
                await task
        await self._engine.close()
        if self._decode is not None:
            await self._decode.close()
        await self._pusher.close()
        if self._inbox is not None:
            await self._inbox.shut()
        for host in self._remote:
            await host.close()

    def _on_message(self, sender: str, message: Message) -> None:
        if self._draining or self.failure is not None:
            match message:
                case Submit(request):
                    self._mail.send(
                        sender, Failed(request.id, request.attempt, "the instance is stopping", True)
                    )
                    return
                case StartPrefill(_, grant) if self.role == "prefill" or self.failure is not None:
                    self._mail.send(sender, PrefillFailed(grant.id, "the instance is stopping"))
                    return
                case _:
                    pass
        taken = self._prefill.on_message(sender, message)
        taken = taken or (self._decode is not None and self._decode.on_message(sender, message))
        taken = taken or (self._replicator is not None and self._replicator.on_message(sender, message))
        if not taken:
            log.error("%s is not for a %s instance (from %s)", type(message).__name__, self.role, sender)

    def _on_lost(self, peer: str) -> None:
        self._reporter.peer_lost(peer)
        self._prefill.on_lost(peer)
        if self._decode is not None:
            self._decode.on_lost(peer)
        if self._replicator is not None:
            self._replicator.on_lost(peer)

    def _on_tokens(self, tokens: list[TokenOut]) -> None:
        tokens = self._prefill.on_tokens(tokens)
        if self._decode is not None:
            self._decode.on_tokens(tokens)

    def _on_error(self, error: BaseException) -> None:
        log.error("the %s engine has stopped", self.role, exc_info=error)
        self.failure = error
        reason = f"the instance's engine has stopped: {type(error).__name__}: {error}"
        self._prefill.fail_all(reason)
        if self._decode is not None:
            self._decode.fail_all(reason)


def _nobody_writes(grant_id: str, num_bytes: int = 0) -> None:
    raise Bug(f"bytes have arrived at a prefill instance, under grant {grant_id}")
