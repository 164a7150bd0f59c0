"""The decode role of one instance: receive a prompt's KV (or compute it), generate, and never lose a block on the way."""

import asyncio
import logging
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

from core.config.cluster_config import TransferConfig
from core.errors import RequestError
from core.messages import (
    Cancel,
    ChunkDone,
    Commit,
    Drained,
    Failed,
    Grant,
    HandedOver,
    Message,
    NeedPrefill,
    PrefillAssigned,
    PrefillFailed,
    Revoke,
    StartPrefill,
    Submit,
)
from core.plan import FailedSeq
from core.ports import Clock, KnowsScheduler, Mail
from core.types import Request, Route, TokenOut
from decode.readers import Readers
from engine.loop import Engine
from engine.planning.planned_reservations import Reservation
from kvtransfer.handoff import DECODE_OVER, Action, DecodeHandoff, DecodeState, Fact
from kvtransfer.inbox import Inbox

log = logging.getLogger(__name__)

_ASK_TIMEOUT_S = 2.0
_LAST_WORD_S = 1.0
_FENCE_PATIENCE_S = 0.5
"""A fence takes longer than this only where a writer is cut off but lives. The client need not wait for that; the blocks must."""
_MAX_GRANTS = 3
"""The number of writers that a prompt is given to before this instance computes it itself, so that it does not wander between
instances without room."""


@dataclass(slots=True, eq=False, kw_only=True)
class _Job:
    """One attempt on this instance, from Submit to its last token or its cancellation."""

    request: Request
    prefill: str
    handoff: DecodeHandoff | None = None
    """None once (or where) this instance computes the sequence like any other."""
    future: "asyncio.Future[Reservation] | None" = None
    reservation: Reservation | None = None
    grant_id: str = ""
    asked: str = ""
    """The scheduler that was asked for another prefill instance."""
    commit: Commit | None = None
    committed_at: float = 0.0
    """When the last Commit came."""
    timer: "asyncio.Task[None] | None" = None
    fence: "asyncio.Task[None] | None" = None
    tasks: "set[asyncio.Task[None]]" = field(default_factory=set["asyncio.Task[None]"])
    cancelled: bool = False


class DecodeWorker:
    """Reacts to messages and engine output; owns the requests in progress."""

    def __init__(
        self,
        mail: Mail,
        clock: Clock,
        *,
        inbox: Inbox,
        config: TransferConfig,
        schedulers: KnowsScheduler,
        engine: Engine,
    ) -> None:
        self._mail, self._clock, self._inbox, self._config = mail, clock, inbox, config
        self._schedulers, self._engine = schedulers, engine
        self._jobs: dict[str, _Job] = {}
        self._grants: dict[str, _Job] = {}
        self._readers = Readers(mail, clock, self._cancel)

    @property
    def num_jobs(self) -> int:
        return len(self._jobs)

    @property
    def adapters(self) -> set[str]:
        """The adapters of the requests that are here."""
        return {job.request.adapter for job in self._jobs.values()}

    @property
    def frontends(self) -> set[str]:
        """The frontends whose requests are here."""
        return self._readers.frontends

    def on_message(self, sender: str, message: Message) -> bool:
        """Handle a message. Returns True when it was for this role."""
        match message:
            case Submit(request, route):
                self._submit(request, route)
            case Cancel(request_id, attempt):
                self._cancel(f"{request_id}#{attempt}")
            case ChunkDone(grant_id=grant_id, seq=_, first_token=_, num_tokens=_, num_bytes=num_bytes):
                if num_bytes:
                    self._inbox.arrived(grant_id, num_bytes)
            case Commit():
                self._committed(message)
            case Drained(grant_id):
                self._writer_done(grant_id, Fact.DRAINED)
            case PrefillFailed(grant_id, reason):
                log.warning("prefill %s failed on grant %s: %s", sender, grant_id, reason)
                self._writer_done(grant_id, Fact.WRITER_FAILED)
            case PrefillAssigned(request_id, attempt, epoch, prefill):
                self._assigned(f"{request_id}#{attempt}", epoch, prefill)
            case _:
                return self._readers.on_message(sender, message)
        return True

    def on_lost(self, peer: str) -> None:
        """Handle a loss. A lost writer is fenced and replaced. What nobody but a lost frontend could read is dropped."""
        for job in list(self._jobs.values()):
            if job.asked == peer:
                self._on_fact(job, Fact.NOBODY)
            if job.prefill == peer:
                self._on_fact(job, Fact.WRITER_LOST)
        for key in self._readers.lose(peer):
            self._cancel(key)

    def on_complete(self, commit: Commit) -> None:
        """Take a grant whose every byte is in the inbox, which has ended it."""
        job = self._grants.get(commit.grant_id)
        if job is not None:
            job.commit = commit
            self._on_fact(job, Fact.COMPLETE)

    def on_corrupted(self, grant_id: str) -> None:
        job = self._grants.get(grant_id)
        if job is not None:
            self._on_fact(job, Fact.CORRUPTED)

    def on_tokens(self, tokens: list[TokenOut]) -> None:
        """Send a step's output, in one message for each frontend."""
        jobs = [self._jobs.get(token.key) for token in tokens]
        self._readers.send(t for t, job in zip(tokens, jobs, strict=True) if job and not job.cancelled)
        for token, job in zip(tokens, jobs, strict=True):
            if job is not None and not job.cancelled and token.finish is not None:
                self._forget(job)

    def on_failed(self, failed: Sequence[FailedSeq]) -> None:
        """Fail these requests for good: a step could not compute them, nor could another instance's."""
        for failure in failed:
            job = self._jobs.get(failure.key)
            if job is not None and not job.cancelled:
                self._fail(job, failure.reason, retryable=False)
                self._cancel(failure.key)

    def fail_all(self, reason: str) -> None:
        """Fail all requests, since the engine has stopped. Other instances may finish them."""
        for job in list(self._jobs.values()):
            if not job.cancelled:
                self._fail(job, reason)
                self._cancel(job.request.key)

    async def close(self) -> None:
        self._readers.shut()
        tasks = [task for job in self._jobs.values() for task in job.tasks]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _submit(self, request: Request, route: Route) -> None:
        if not self._readers.open(request):
            return
        request = replace(request, resumption=None)
        job = self._jobs[request.key] = _Job(request=request, prefill=route.prefill)
        try:
            if route.prefill:
                self._reserve(job)
            else:
                self._engine.add(request)
        except RequestError as error:
            self._refuse(job, error)

    def _reserve(self, job: _Job) -> None:
        job.handoff = DecodeHandoff()
        job.future = self._engine.reserve(job.request)
        job.future.add_done_callback(lambda future: self._reserved(job, future))

    def _reserved(self, job: _Job, future: "asyncio.Future[Reservation]") -> None:
        if future.cancelled():
            return
        error = future.exception()
        if error is not None:
            self._refuse(job, error)
            return
        job.reservation = future.result()
        if job.handoff is not None and job.handoff.state in DECODE_OVER:
            self._engine.release(job.request.key)  # cancelled while the answer was on its way
            return
        # Computing a few tokens costs less than a hand-over, for which the writer has to compute what is here already, too, as
        # far as it is not in its own cache: after a loss that is the whole output.
        self._on_fact(job, Fact.RESERVED_LOCAL if job.reservation.computes_rest else Fact.RESERVED)

    def _refuse(self, job: _Job, error: BaseException) -> None:
        self._fail(job, str(error), retryable=not isinstance(error, RequestError))
        self._forget(job)

    def _fail(self, job: _Job, reason: str, *, retryable: bool = True) -> None:
        request = job.request
        self._readers.tell(request, Failed(request.id, request.attempt, reason, retryable))

    def _cancel(self, key: str) -> None:
        job = self._jobs.get(key)
        if job is None or job.cancelled:
            return
        job.cancelled = True
        self._readers.close(key)
        if job.handoff is None or job.handoff.state in DECODE_OVER:
            self._engine.abort(key)
            self._forget(job)
        else:
            self._on_fact(job, Fact.CANCELLED)

    def _forget(self, job: _Job) -> None:
        self._readers.close(job.request.key)
        self._jobs.pop(job.request.key, None)
        self._grants.pop(job.grant_id, None)
        for task in job.tasks - {asyncio.current_task()}:
            task.cancel()

    def _writer_done(self, grant_id: str, fact: Fact) -> None:
        def ended() -> None:
            job = self._grants.get(grant_id)
            if job is not None:
                if job.fence is not None:
                    job.fence.cancel()
                self._on_fact(job, fact)

        self._inbox.end(grant_id, ended)

    def _committed(self, commit: Commit) -> None:
        job = self._grants.get(commit.grant_id)
        if job is not None:
            job.committed_at = self._clock.now()
        self._inbox.committed(commit)

    def _assigned(self, key: str, epoch: int, prefill: str) -> None:
        job = self._jobs.get(key)
        if job is not None and job.handoff is not None and job.handoff.epoch == epoch:
            if prefill:
                job.prefill = prefill
            self._on_fact(job, Fact.ASSIGNED if prefill else Fact.NOBODY)

    def _on_fact(self, job: _Job, fact: Fact) -> None:
        if job.handoff is not None and (action := job.handoff.on(fact)) is not None:
            self._ACTIONS[action](self, job)

    def _revoke(self, job: _Job) -> None:
        self._mail.send(job.prefill, Revoke(job.grant_id))
        self._set_timer(job, self._config.drain_timeout_s)

    def _cut_off(self, job: _Job) -> None:
        job.fence = self._spawn(job, self._fence(job, job.grant_id, job.prefill))
        self._set_timer(job, _FENCE_PATIENCE_S)

    def _compute(self, job: _Job) -> None:
        assert job.reservation is not None
        self._stop_timer(job)
        self._engine.compute(job.reservation)

    def _release(self, job: _Job) -> None:
        self._engine.release(job.request.key)
        self._forget(job)

    def _give_up(self, job: _Job) -> None:
        log.error("request %s: writer %s is cut off but alive; its blocks wait", job.request.id, job.prefill)
        job.cancelled = True
        self._fail(job, f"the prefill instance {job.prefill} is cut off")
        self._readers.close(job.request.key)

    def _withdraw(self, job: _Job) -> None:
        if job.future is not None:
            job.future.cancel()
        self._forget(job)

    def _grant(self, job: _Job) -> None:
        assert job.reservation is not None
        assert job.handoff is not None
        r, ttl_s = job.reservation, self._config.grant_ttl_s
        grant = self._inbox.open(
            r.key,
            job.handoff.epoch,
            job.prefill,
            r.block_ids,
            first_token=r.matched_tokens,
            num_tokens=r.num_tokens,
            ttl_s=ttl_s,
        )
        self._grants.pop(job.grant_id, None)
        job.grant_id = grant.id
        self._grants[grant.id] = job
        self._inbox.when_open(lambda: self._start_prefill(job, grant))
        self._set_timer(job, ttl_s)

    def _start_prefill(self, job: _Job, grant: Grant) -> None:
        """Start prefill unless it has been taken back meanwhile."""
        granted = job.handoff is not None and job.handoff.state is DecodeState.GRANTED
        if granted and job.grant_id == grant.id:
            self._mail.send(job.prefill, StartPrefill(job.request, grant))

    def _ask(self, job: _Job) -> None:
        """Ask the scheduler for another prefill instance. Without an answer this instance computes the prompt itself."""
        assert job.reservation is not None
        assert job.handoff is not None
        request, missing = job.request, job.reservation.num_tokens - job.reservation.matched_tokens
        log.warning("request %s needs another prefill instance than %s", request.id, job.prefill)
        if not self._schedulers.scheduler or job.handoff.epoch + 1 >= _MAX_GRANTS:
            self._on_fact(job, Fact.NOBODY)
            return
        ask = NeedPrefill(
            request_id=request.id,
            attempt=request.attempt,
            epoch=job.handoff.epoch,
            num_tokens=missing,
            lost=job.prefill,
        )
        job.asked = self._schedulers.scheduler
        self._mail.send(job.asked, ask)
        self._set_timer(job, _ASK_TIMEOUT_S)

    async def _fence(self, job: _Job, grant_id: str, writer: str) -> None:
        asking = self._spawn(job, self._ask_for_last_word(grant_id, writer))
        try:
            await self._inbox.fence(grant_id, writer)
        finally:
            asking.cancel()
        self._on_fact(job, Fact.FENCED)

    async def _ask_for_last_word(self, grant_id: str, writer: str) -> None:
        """Ask a writer for its last message. One that was only stopped or cut off can end its fence itself, even if it has
        forgotten the grant."""
        while True:
            await self._clock.sleep(_LAST_WORD_S)
            self._mail.send(writer, Revoke(grant_id))

    def _activate(self, job: _Job) -> None:
        assert job.reservation is not None
        assert job.commit is not None
        self._stop_timer(job)
        sampled, request = (job.commit.first, *job.commit.more), job.request
        # A writer of an older release has counted its own writes in `exposed_s`.
        exposed_s = job.commit.times.exposed_s + self._clock.now() - job.committed_at
        times = replace(job.commit.times, exposed_s=exposed_s)
        handed_over = HandedOver(request.id, request.attempt, job.commit.num_bytes, times)
        self._readers.tell(request, handed_over)
        self._engine.activate(job.reservation, sampled)
        # The prefill instance has sent these tokens too; should it have died before, the client gets them from here.
        self.on_tokens([*sampled])

    def _set_timer(self, job: _Job, delay_s: float) -> None:
        self._stop_timer(job)

        async def expire() -> None:
            await self._clock.sleep(delay_s)
            job.timer = None
            self._on_fact(job, Fact.TIMEOUT)

        job.timer = self._spawn(job, expire())

    def _stop_timer(self, job: _Job) -> None:
        if job.timer is not None:
            job.timer.cancel()
            job.timer = None

    def _spawn(self, job: _Job, work: Coroutine[Any, Any, None]) -> "asyncio.Task[None]":
        task = asyncio.create_task(work)
        job.tasks.add(task)
        task.add_done_callback(job.tasks.discard)
        return task

    _ACTIONS: ClassVar[dict[Action, Callable[["DecodeWorker", _Job], None]]] = {
        Action.GRANT: _grant,
        Action.REVOKE: _revoke,
        Action.FENCE: _cut_off,
        Action.ASK: _ask,
        Action.ACTIVATE: _activate,
        Action.COMPUTE: _compute,
        Action.RELEASE: _release,
        Action.GIVE_UP: _give_up,
        Action.WITHDRAW: _withdraw,
    }
    """What each action of a hand-over does."""
