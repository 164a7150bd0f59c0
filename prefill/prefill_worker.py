"""The prefill role of one instance: compute a granted prompt, send its first token to the client and its KV to decode."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

from core.errors import RequestError, TransferError
from core.messages import Drained, Grant, Message, PrefillFailed, Revoke, StartPrefill, Tokens
from core.pacing.lateness import due_at
from core.plan import FailedSeq
from core.ports import Mail
from core.types import Request, TokenOut
from engine.loop import Engine
from engine.planning.planner_protocol import Sequences
from kvtransfer.handoff import PushAction, PushFact, PushHandoff, PushState
from kvtransfer.pusher import Pusher

log = logging.getLogger(__name__)

_MAX_REMEMBERED = 4096
_WORTH_S = 0.02
"""Writes that take less than this are waited for."""


@dataclass(slots=True, kw_only=True)
class _Job:
    request: Request
    grant: Grant
    handoff: PushHandoff = field(default_factory=PushHandoff)
    reason: str = ""
    sampled: list[TokenOut] = field(default_factory=list[TokenOut])
    computes: bool = False
    """Whether the engine has a sequence of this very job."""


class PrefillWorker:
    """Reacts to messages and engine output; owns the hand-overs in progress."""

    def __init__(self, mail: Mail, pusher: Pusher, engine: Engine, sequences: Sequences) -> None:
        """`sequences` are the engine's."""
        self._mail, self._pusher, self._engine, self._sequences = mail, pusher, engine, sequences
        self._jobs: dict[str, _Job] = {}
        self._by_key: dict[str, str] = {}
        self._sent: list[str] = []
        """Attempts whose hand-over has ended since the last report."""
        self._over: dict[str, None] = {}
        """Grants of which this instance has said that nothing more will be written. A StartPrefill for one, late or repeated, is
        ignored."""

    @property
    def num_jobs(self) -> int:
        return len(self._jobs)

    @property
    def adapters(self) -> set[str]:
        """The adapters of the requests that are here."""
        return {job.request.adapter for job in self._jobs.values()}

    def drain_sent(self) -> tuple[str, ...]:
        """Return the attempts whose KV has left, or will never leave, since the last call."""
        sent, self._sent = tuple(self._sent), []
        return sent

    def on_message(self, sender: str, message: Message) -> bool:
        """Handle a message. Returns True when it was for this role."""
        match message:
            case StartPrefill(request, grant):
                self._start(sender, request, grant)
            case Revoke(grant_id):
                self._revoke(sender, grant_id)
            case _:
                return False
        return True

    def on_lost(self, peer: str) -> None:
        """Handle the loss of a decode instance, which may only be cut off: it gives what was filled there to another writer."""
        for grant_id, job in list(self._jobs.items()):
            if job.grant.holder == peer:
                self._on_fact(grant_id, PushFact.HOLDER_LOST)
        self._pusher.holder_lost(peer)

    def on_tokens(self, tokens: list[TokenOut]) -> list[TokenOut]:
        """Take the tokens of its own sequences out of a step's output, and return the others.

        The client's first token does not wait for the transfer; nor do the next ones, where the link is slow. As long as decode's
        blocks have room and the writes are far behind, the sequence goes on here, and it changes over between two tokens."""
        if not self._by_key:
            return tokens
        others: list[TokenOut] = []
        for token in tokens:
            grant_id = self._by_key.get(token.key)
            if grant_id is None:
                others.append(token)
                continue
            job = self._jobs[grant_id]
            if job.handoff.state is PushState.COMPUTING:
                self._sampled(job, token)
        return others

    def _sampled(self, job: _Job, token: TokenOut) -> None:
        grant = job.grant
        job.sampled.append(token)
        self._mail.send(job.request.reply_to, Tokens((token,)))
        key = job.request.key
        room = len(job.sampled) <= grant.room_tokens and self._sequences.has_room(key)
        if token.finish is not None or not room or self._pusher.remaining_s(grant.id) < _WORTH_S:
            self._sequences.hold(key)
            job.handoff.on(PushFact.FIRST_TOKEN)
            self._pusher.finish(grant.id, job.sampled)

    def on_stuck(self, keys: list[str]) -> None:
        """Let other instances compute these prompts, since all blocks here are reserved to prompts that others compute."""
        for key in keys:
            self._failed(
                self._by_key[key], "all KV blocks here are reserved for prompts that other instances compute"
            )

    def on_taken_back(self, paused: list[str], lost: list[str]) -> None:
        """Let these prompts go on when nothing of them is being sent. Those that are lost are computed elsewhere."""
        for key in paused:
            self._pusher.when_idle(self._by_key[key], partial(self._engine.go_on, key))
        for key in lost:
            self._failed(self._by_key[key], "there was no memory for the step that computed it")

    def on_failed(self, failed: Sequence[FailedSeq]) -> None:
        """Let the holder of the blocks find another instance, or compute these prompts itself."""
        for failure in failed:
            if (grant_id := self._by_key.get(failure.key)) is not None:
                self._failed(grant_id, failure.reason)

    def fail_all(self, reason: str) -> None:
        for grant_id, job in list(self._jobs.items()):
            job.reason = reason
            self._on_fact(grant_id, PushFact.FAILED)

    def _start(self, sender: str, request: Request, grant: Grant) -> None:
        if grant.id in self._jobs or grant.id in self._over:
            return
        try:
            urgency = (-request.slo.priority, due_at(request))
            self._pusher.open(grant, self._delivered, self._quiet, self._failed, urgency)
        except TransferError as error:
            log.error("request %s cannot be handed over: %s", request.id, error)
            self._remember(grant.id)
            self._sent.append(request.key)
            self._mail.send(sender, PrefillFailed(grant.id, str(error)))
            return
        job = self._jobs[grant.id] = _Job(request=request, grant=grant)
        try:
            self._engine.add(request, push=grant)
        except RequestError as error:
            self._failed(grant.id, str(error))
            return
        job.computes = True
        self._by_key[request.key] = grant.id

    def _revoke(self, sender: str, grant_id: str) -> None:
        if grant_id in self._jobs:
            self._on_fact(grant_id, PushFact.REVOKED)
        else:  # it is over, was given to an earlier incarnation, or has not arrived yet
            self._remember(grant_id)
            self._mail.send(sender, Drained(grant_id))

    def _remember(self, grant_id: str) -> None:
        self._over[grant_id] = None
        if len(self._over) > _MAX_REMEMBERED:
            del self._over[next(iter(self._over))]

    def _delivered(self, grant_id: str) -> None:
        self._on_fact(grant_id, PushFact.DELIVERED)

    def _quiet(self, grant_id: str) -> None:
        self._on_fact(grant_id, PushFact.QUIET)

    def _failed(self, grant_id: str, reason: str) -> None:
        job = self._jobs.get(grant_id)
        if job is not None:
            job.reason = job.reason or reason
            log.warning("request %s: its KV is not sent: %s", job.request.id, reason)
            self._on_fact(grant_id, PushFact.FAILED)

    def _on_fact(self, grant_id: str, fact: PushFact) -> None:
        job = self._jobs.get(grant_id)
        if job is None:
            return
        match job.handoff.on(fact):
            case PushAction.STOP:
                self._stop_computing(job)
                self._pusher.stop(grant_id)
            case PushAction.GIVE_UP:
                self._stop_computing(job)
                self._pusher.stop(grant_id, reason=job.reason or "prefill failed")
            case PushAction.RELEASE:
                del self._jobs[grant_id]
                self._remember(grant_id)
                self._sent.append(job.request.key)
                if job.computes:
                    del self._by_key[job.request.key]
                    self._engine.release(job.request.key)
            case _:
                pass

    def _stop_computing(self, job: _Job) -> None:
        if job.computes:
            self._engine.abort(job.request.key)
