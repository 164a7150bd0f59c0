"""What the API asks of the cluster: answers, and what the scheduler and the instances know."""

import asyncio
import contextlib
import itertools
import logging
import uuid
from collections.abc import AsyncGenerator, Callable, Generator, Sequence
from functools import partial
from typing import Any

from cluster.ingress.delivery.attempts import Attempts
from cluster.ingress.delivery.beam_search import BeamParams
from cluster.ingress.delivery.delivery import Delivery
from cluster.ingress.delivery.kept_streams import KeptStream, kept_stream
from cluster.ingress.delivery.live_adapters import LiveAdapters
from cluster.ingress.delivery.model_sleep import ModelSleep
from cluster.ingress.delivery.questions import Questions
from cluster.ingress.delivery.readiness import Readiness
from cluster.ingress.delivery.running_attempt import Lost, failure_of, refusal_of
from cluster.ingress.delivery.search_steps import Found, search
from cluster.ingress.delivery.shared_prompt import SharedPrompt
from cluster.ingress.telemetry.timeline import Observe, Timeline, nobody
from core.config.cluster_config import ScheduleConfig
from core.errors import BatonError, ReplicaLost
from core.limit_messages import AskedShare, Share
from core.messages import (
    AdapterChanged,
    AdapterList,
    AskShares,
    AskStatus,
    CacheDropped,
    DropCache,
    Failed,
    HandedOver,
    HintSession,
    Leaving,
    Message,
    PlaceReply,
    Rejected,
    SessionHinted,
    SharesGranted,
    Tokens,
)
from core.ports import Clock, Mail, Resolve
from core.reports import DroppedBlocks, Status
from core.sleep_messages import SleepAnswer
from core.stream_messages import FindStream, StreamFound
from core.types import Request, TokenOut
from net.schedulers import Schedulers

log = logging.getLogger(__name__)

_SHARES_S = 60.0
"""The longest wait for shares of limits. Requests wait for less. What comes late is kept."""


class Frontend:
    """Generates for the API; one per ingress process. `run` must be running; `close` ends it."""

    def __init__(
        self,
        mail: Mail,
        clock: Clock,
        config: ScheduleConfig,
        block_size: int,
        *,
        resolve_schedulers: Resolve,
        request_timeout_s: float,
        observe: Observe = nobody,
        num_schedulers: int = 1,
        num_spare_schedulers: int = 0,
        loads_adapters: bool = False,
    ) -> None:
        self._mail, self._clock, self._observe = mail, clock, observe
        self._schedulers = Schedulers(
            resolve_schedulers, num_schedulers, clock, self._on_scheduler, num_spares=num_spare_schedulers
        )
        self._attempts = Attempts(
            mail, clock, config, block_size, self._schedulers, timeout_s=request_timeout_s
        )
        self._questions = Questions(mail)
        self.adapters = LiveAdapters(
            mail, self._schedulers, self._questions, request_timeout_s, is_on=loads_adapters
        )
        self.model_sleep = ModelSleep(mail, clock, self._schedulers, self._questions, self.status)
        self._nonces = itertools.count()
        self._retiring, self._readiness = False, Readiness()
        self._prefix = uuid.uuid4().hex[:8]

    @property
    def address(self) -> str:
        return self._mail.address

    @property
    def num_running(self) -> int:
        return len(self._attempts)

    def new_request_id(self) -> str:
        return f"{self._prefix}-{next(self._nonces)}"

    async def run(self) -> None:
        """Keep the schedulers' addresses current, for as long as the frontend lives."""
        self._mail.listen(self._on_message, self._on_lost)
        await self._schedulers.run()

    def retire(self) -> None:
        """Be not ready from now on. Requests that still come are answered."""
        self._retiring = True

    async def close(self) -> None:
        self._attempts.close()
        await self._mail.close()

    async def status(self) -> Status:
        """Return what the leading scheduler knows now. Raises ReplicaLost when it does not answer."""
        if not (scheduler := self._schedulers.first):
            raise ReplicaLost("the scheduler is not known yet")
        return await self._questions.ask(scheduler, AskStatus, "the scheduler")

    async def ask_shares(self, asked: tuple[AskedShare, ...]) -> Sequence[Share]:
        """Return what the leading scheduler grants of limits. Raises ReplicaLost when it is lost before it answers."""
        if not (scheduler := self._schedulers.first):
            raise ReplicaLost("the scheduler is not known yet")
        question = partial(AskShares, asked=asked)
        return (await self._questions.ask(scheduler, question, "the scheduler", _SHARES_S)).shares

    async def drop_caches(self) -> dict[str, DroppedBlocks]:
        """Have every instance give up its prefix cache, and return what each has dropped, by address. Raises ReplicaLost, naming
        one that does not answer."""
        answers = await self._ask_instances(DropCache)
        return {address: answer.blocks for address, answer in answers.items()}

    async def hint_session(self, tenant: str, session: str, *, release: bool) -> list[str]:
        """Have every instance release a tenant's session, or read its KV back. Returns the addresses of those that know it.
        Raises ReplicaLost, naming one that does not answer."""
        answers = await self._ask_instances(lambda nonce: HintSession(nonce, tenant, session, release))
        return [address for address, answer in answers.items() if answer.known]

    def noted(self, request: Request, num_tokens: int, kept_at: str) -> None:
        """Tell the instance that has what was generated (`FindsStreams`)."""
        self._attempts.noted(request, num_tokens, kept_at)

    async def find_stream(self, stream: str, owner: str) -> KeptStream | None:
        """Return what instances have of an owner's stream. One that is lost has nothing. Raises ReplicaLost where the scheduler
        does not answer."""

        async def ask(address: str) -> tuple[str, StreamFound]:
            def question(nonce: int) -> Message:
                return FindStream(nonce, stream, owner)

            try:
                return address, await self._questions.ask(address, question, f"the instance {address}")
            except ReplicaLost:
                return address, StreamFound(nonce=0)

        decoding = [one.address for one in (await self.status()).instances if one.decodes]
        return kept_stream(await asyncio.gather(*map(ask, decoding)))

    async def _ask_instances(self, question: Callable[[int], Message]) -> dict[str, Any]:
        """Return what every instance answers, by address. Raises ReplicaLost."""
        addresses = [instance.address for instance in (await self.status()).instances]
        asked = [self._questions.ask(one, question, f"the instance {one}") for one in addresses]
        return dict(zip(addresses, await asyncio.gather(*asked), strict=True))

    async def ready(self) -> tuple[bool, str]:
        """Return whether a request would be answered in time (`Readiness`), and if not, why."""
        if self._retiring:
            return False, "shutting down"
        try:
            why_not = (await self.status()).why_not or self.adapters.why_not
        except ReplicaLost as error:
            why_not = str(error)
        self._readiness.saw(why_not, self._clock.now())
        return not self._readiness.why_not, self._readiness.why_not

    async def generate(
        self, request: Request, shared: SharedPrompt | None = None
    ) -> AsyncGenerator[TokenOut, None]:
        """Yield the request's tokens, in order, each once. Closing the iterator cancels the request everywhere. `shared`: one for
        all requests of a prompt, which is computed and handed over once.

        Raises Overloaded, RequestError, or ReplicaLost when the request could not be finished in time or anywhere."""
        request = self.adapters.renewed(request)
        with (
            self._observed(request) as timeline,
            contextlib.closing(Delivery(request, self._attempts, timeline, shared)) as delivery,
        ):
            while tokens := await delivery.take():
                for token in tokens:
                    timeline.num_output += 1
                    yield token

    async def search(self, request: Request, params: BeamParams, count: int) -> Found:
        """The `count` best answers that a beam search finds (`search_steps.search`). Raises as `generate` does."""
        request = self.adapters.renewed(request)
        with self._observed(request) as whole:

            async def sample(step: Request, shared: SharedPrompt) -> TokenOut:
                timeline = Timeline(request=request, started_at=whole.started_at)
                try:
                    with contextlib.closing(Delivery(step, self._attempts, timeline, shared)) as delivery:
                        return (await delivery.take())[0]
                finally:
                    whole.attempts += [one for one in timeline.attempts if one.lost or not whole.attempts]

            found = await search(request, params, count, sample, self.new_request_id)
            whole.num_output = len(found.beams[0])
            return found

    @contextlib.contextmanager
    def _observed(self, request: Request) -> Generator[Timeline]:
        """The request's timeline, of which the observers hear at its end."""
        timeline = Timeline(request=request, started_at=self._clock.now())
        try:
            with self.adapters.running(request.adapter):
                yield timeline
        except BatonError as error:
            timeline.error, timeline.error_type = str(error), type(error).__name__
            raise
        finally:
            timeline.ended_at = self._clock.now()
            self._observe(timeline)

    def _on_message(self, sender: str, message: Message) -> None:
        match message:
            case Tokens(tokens):
                self._attempts.receive(sender, tokens)
            case PlaceReply():
                self._attempts.placed(sender, message)
            case Rejected(request_id, attempt):
                self._attempts.fail(request_id, attempt, refusal_of(message))
            case Failed(request_id, attempt, reason, retryable):
                self._attempts.fail(request_id, attempt, Lost(sender) if retryable else failure_of(reason))
            case HandedOver():
                self._attempts.handed_over(message)
            case Leaving(address):
                self._attempts.leave(address)
            case AdapterList():
                self.adapters.hear(message)
            case (
                Status()
                | CacheDropped()
                | SessionHinted()
                | AdapterChanged()
                | SleepAnswer()
                | StreamFound()
                | SharesGranted()
            ):
                self._questions.answered(message)
            case _:
                log.error("%s is not for a frontend (from %s)", type(message).__name__, sender)

    def _on_scheduler(self, address: str) -> None:
        self.adapters.greet(address)
        self._attempts.ask_all()

    def _on_lost(self, peer: str) -> None:
        self._questions.lost(peer)
        if self._schedulers.lose(peer):
            self._attempts.ask_all()
        self._attempts.lose(peer)
