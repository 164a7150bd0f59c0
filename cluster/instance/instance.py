"""One instance: its engine, its roles' workers, its transports, and their life together in one process."""

import asyncio
import contextlib
import logging
from collections.abc import Sequence
from dataclasses import replace

from cluster.instance.instance_adapters import InstanceAdapters
from cluster.instance.instance_parts import (
    InstanceParts,
    Role,
    make_engine,
    make_inbox,
    make_pusher,
    make_replicator,
    make_scheduler,
    registration,
    run_without_inbox,
)
from cluster.instance.openmp_files import remove_openmp_files
from cluster.instance.reporting import Reporter
from core.adapter_messages import AdapterList
from core.config.cluster_config import ClusterConfig
from core.errors import Hung
from core.messages import (
    CacheDropped,
    DropCache,
    Failed,
    HintSession,
    Leaving,
    Message,
    PrefillFailed,
    SessionHinted,
    StartPrefill,
    Submit,
)
from core.plan import FailedSeq
from core.ports import Clock, Mail, Resolve
from core.reports import StartTimes, WorkCounts
from core.types import Request, TokenOut
from decode.decode_worker import DecodeWorker
from engine.loop import Engine
from engine.planning.whole_prompts import encoder_config
from kvtransfer.inbox import Inbox
from prefill.prefill_worker import PrefillWorker
from prefill.prompt_worker import PromptWorker

log = logging.getLogger(__name__)

_LOOK_S = 0.05


class Instance:
    """`run` begins to serve; `close` gives everything back. `failure` is set once the engine has stopped by itself."""

    def __init__(
        self,
        config: ClusterConfig,
        role: Role,
        mail: Mail,
        clock: Clock,
        resolve: Resolve,
        parts: InstanceParts,
        *,
        num_spare_schedulers: int = 0,
    ) -> None:
        self.role: Role = role
        self.failure: BaseException | None = None
        self.stuck = asyncio.Event()
        """A thread of this process computes that nothing ends but the process' end."""
        self.address = mail.address
        self._mail, self._clock = mail, clock
        self._draining = False
        self._has_failed = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []

        if parts.encodes:
            engine = encoder_config(config.engine, parts.max_context_tokens)
            config = config.model_copy(update={"engine": engine})
        self._remote, self._timer = parts.remote, parts.timer
        self._scheduler = make_scheduler(config, role, parts)
        self._pusher = make_pusher(mail, clock, parts)
        self._engine = make_engine(config, self._scheduler, self._pusher, clock, parts)
        self._prefill = PrefillWorker(mail, self._pusher, self._engine, self._scheduler.sequences)
        """A decode instance has it, too: it sends what it has when its requests move away."""
        self._reporter = Reporter(
            registration(config, role, mail.address, parts),
            self._engine,
            mail,
            clock,
            resolve=resolve,
            num_schedulers=config.serve.schedulers,
            interval_s=config.schedule.report_interval_s,
            check=self.check_integrity,
            count=self.work_counts,
            links=self._pusher.links,
            drain_sent=self._prefill.drain_sent,
            first_words=lambda: self._adapters.introduction(),
            num_spare_schedulers=num_spare_schedulers,
        )
        self._adapters = InstanceAdapters(
            config.adapters,
            parts.adapters,
            hold=self._engine.hold_adapters,
            in_use=self._adapters_in_use,
            tell=self._reporter.tell,
            clock=clock,
        )
        self._inbox: Inbox | None = None
        self._decode: DecodeWorker | None = None
        self._prompts: PromptWorker | None = None
        """A decode worker does the same."""
        if role == "prefill":
            self._prompts = PromptWorker(mail, self._engine)
            run_without_inbox(parts)
        else:
            self._inbox, self._decode = _decoding(
                config, mail, clock, parts, engine=self._engine, reporter=self._reporter
            )
        self._replicator = make_replicator(config, role, mail, clock, parts)

    def run(self, *, begins: str = "started") -> StartTimes:
        """Begin to serve, which ends the start. Returns how long that took. `begins` is what the log calls it."""
        start = StartTimes()
        if self._timer is not None:
            start = self._timer.times()
            log.info("the %s instance %s has %s in %s", self.role, self.address, begins, start.summary())
            self._reporter.started(start)
        self._mail.listen(self._on_message, self._on_lost)
        running = (self._engine.run(self), self._reporter.run(), self._adapters.run())
        self._tasks = [asyncio.create_task(each) for each in running]
        if self._replicator is not None:
            self._tasks.append(asyncio.create_task(self._replicator.run()))
        return start

    @property
    def num_jobs(self) -> int:
        own = self._decode or self._prompts
        return self._prefill.num_jobs + (own.num_jobs if own else 0)

    @property
    def computes(self) -> bool:
        """Whether a request that is placed here now would be computed. False until a scheduler knows this instance, from a drain
        on, and once the engine has stopped, also because a rank or a step hangs."""
        return self.failure is None and not self._draining and self._reporter.is_known

    def _adapters_in_use(self) -> set[str]:
        own = self._decode or self._prompts
        return self._prefill.adapters | (own.adapters if own else set())

    @property
    def num_used_blocks(self) -> int:
        return self._scheduler.load().num_used_blocks

    @property
    def num_grants(self) -> int:
        """The number of rights to write into this instance's pool."""
        return self._inbox.num_live if self._inbox else 0

    def check_integrity(self) -> None:
        """Raise Bug where the block accounting or the grants disagree with themselves."""
        self._scheduler.check_integrity()
        if self._inbox is not None:
            self._inbox.check_integrity()

    def work_counts(self) -> WorkCounts:
        """Return what the engine has done, and how many rights to write this instance has given."""
        counts, inbox = self._engine.work_counts(), self._inbox
        if inbox is None:
            return counts
        return replace(counts, grants=inbox.num_granted, live_grants=inbox.num_live, fences=inbox.num_fenced)

    async def drain(self, timeout_s: float, *, moves: bool = True) -> None:
        """Refuse new work, have what is here finish, or go on elsewhere if it `moves`, for at most `timeout_s`."""
        self._draining = True
        self._reporter.leave()
        for frontend in self._decode.frontends if self._decode and moves else ():
            self._mail.send(frontend, Leaving(self.address))
        await self._settled(timeout_s)

    async def interrupt(self, why: str, timeout_s: float) -> None:
        """Give up what is here, for another attempt to go on with. Wait until no writer and no reader is left, for at most
        `timeout_s`."""
        self._fail_all(why)
        await self._settled(timeout_s)

    async def _settled(self, timeout_s: float) -> None:
        deadline = self._clock.now() + timeout_s
        while self.num_jobs and self._clock.now() < deadline:
            await self._clock.sleep(_LOOK_S)

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
        remove_openmp_files()  # of ranks that were killed

    def _on_message(self, sender: str, message: Message) -> None:
        match message:
            case Submit(request) if why := self._why_not(request, goes_on=False):
                self._mail.send(sender, Failed(request.id, request.attempt, why, retryable=True))
                return
            case StartPrefill(request, grant) if why := self._why_not(
                request, goes_on=self.role != "prefill"
            ):
                self._mail.send(sender, PrefillFailed(grant.id, why))
                return
            case DropCache(nonce):
                if self._replicator is not None:
                    self._replicator.drop()
                self._mail.send(sender, CacheDropped(nonce, self._engine.drop_cache()))
                return
            case HintSession(nonce, tenant, session, release):
                known = self._engine.hint_session(tenant, session, release=release)
                self._mail.send(sender, SessionHinted(nonce, known))
                return
            case AdapterList():
                self._adapters.hear(message)
                return
            case _:
                pass
        taken = self._prefill.on_message(sender, message)
        taken = taken or (self._prompts is not None and self._prompts.on_message(message))
        taken = taken or (self._decode is not None and self._decode.on_message(sender, message))
        taken = taken or (self._replicator is not None and self._replicator.on_message(sender, message))
        if not taken:
            log.error("%s is not for a %s instance (from %s)", type(message).__name__, self.role, sender)

    def _why_not(self, request: Request, *, goes_on: bool) -> str:
        """Return why a request cannot be served here; empty where it can. `goes_on`: it is of those that a drain finishes."""
        if self.failure is not None or (self._draining and not goes_on):
            return "the instance is stopping"
        if request.adapter and request.adapter not in self._adapters:
            return f"the instance does not have the adapter {request.adapter!r}"
        return ""

    def _on_lost(self, peer: str) -> None:
        self._reporter.peer_lost(peer)
        self._prefill.on_lost(peer)
        if (own := self._decode or self._prompts) is not None:
            own.on_lost(peer)
        if self._replicator is not None:
            self._replicator.on_lost(peer)

    def on_tokens(self, tokens: list[TokenOut]) -> None:
        tokens = self._prefill.on_tokens(tokens)
        if (own := self._decode or self._prompts) is not None:
            own.on_tokens(tokens)

    def on_stuck(self, keys: list[str]) -> None:
        self._prefill.on_stuck(keys)

    def on_taken_back(self, paused: list[str], lost: list[str]) -> None:
        self._prefill.on_taken_back(paused, lost)

    def on_failed(self, failed: Sequence[FailedSeq]) -> None:
        for failure in failed:
            log.warning("request %s fails: %s", failure.key, failure.reason)
        self._prefill.on_failed(failed)
        if (own := self._decode or self._prompts) is not None:
            own.on_failed(failed)

    async def failed(self) -> BaseException:
        """Wait until the engine has stopped by itself, and return why."""
        await self._has_failed.wait()
        assert self.failure is not None
        return self.failure

    def on_error(self, error: BaseException) -> None:
        log.error("the %s engine has stopped", self.role, exc_info=error)
        self.failure = error
        self._has_failed.set()
        self._reporter.leave(hung=isinstance(error, Hung))
        if isinstance(error, Hung) and error.runs_on:
            self.stuck.set()
        self._fail_all(f"the instance's engine has stopped: {type(error).__name__}: {error}")

    def _fail_all(self, reason: str) -> None:
        self._prefill.fail_all(reason)
        if (own := self._decode or self._prompts) is not None:
            own.fail_all(reason)


def _decoding(
    config: ClusterConfig,
    mail: Mail,
    clock: Clock,
    parts: InstanceParts,
    *,
    engine: Engine,
    reporter: Reporter,
) -> tuple[Inbox, DecodeWorker]:
    """Return what receives sequences, and what decodes them. Each calls the other."""
    inbox = make_inbox(
        mail.address,
        parts,
        lambda commit: worker.on_complete(commit),
        lambda key: worker.on_corrupted(key),
    )
    worker = DecodeWorker(
        mail, clock, inbox=inbox, config=config.transfer, schedulers=reporter, engine=engine
    )
    return inbox, worker
