"""The frontend's half of a request: places it, submits it, puts its tokens in order, and starts over elsewhere when a worker
dies.

Invariant: a client sees output token i exactly once, after token i-1, whatever was lost, doubled or reordered on the way."""

import asyncio
import contextlib
import itertools
import logging
import uuid
from collections.abc import AsyncGenerator, Generator
from dataclasses import replace
from zlib import crc32

from cluster.ingress.beam_search import BeamParams
from cluster.ingress.live_adapters import LiveAdapters
from cluster.ingress.questions import Questions
from cluster.ingress.running_attempt import Lost, Moved, RunningAttempt, refusal_of
from cluster.ingress.search_steps import Found, search
from cluster.ingress.shared_prompt import SharedPrompt
from cluster.ingress.timeline import Observe, Timeline, nobody
from core.config import ScheduleConfig
from core.errors import BatonError, Overloaded, ReplicaLost, RequestError
from core.kv import block_hashes
from core.messages import (
    AdapterChanged,
    AdapterList,
    AskStatus,
    CacheDropped,
    Cancel,
    DropCache,
    Failed,
    Finished,
    HandedOver,
    Leaving,
    Message,
    Place,
    Placed,
    Rejected,
    Submit,
    Tokens,
)
from core.ports import Clock, Mail, Resolve
from core.reports import DroppedBlocks, Status
from core.types import Request, TokenOut
from net.schedulers import Schedulers

log = logging.getLogger(__name__)

_MAX_FRUITLESS_ATTEMPTS = 5
_GRACE_S = 5.0
"""How much longer than the scheduler's own limit the frontend waits for its answer."""


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
        loads_adapters: bool = False,
    ) -> None:
        self._mail, self._clock, self._config = mail, clock, config
        self._block_size = block_size
        self._observe = observe
        self._timeout_s = request_timeout_s
        self._schedulers = Schedulers(resolve_schedulers, num_schedulers, clock, self._on_scheduler)
        self._attempts: dict[str, RunningAttempt] = {}
        self._questions = Questions(mail)
        self.adapters = LiveAdapters(
            mail, self._schedulers, self._questions, request_timeout_s, is_on=loads_adapters
        )
        self._nonces = itertools.count()
        self._retiring = False
        self._moves: set[asyncio.Task[None]] = set()
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
        for move in self._moves:
            move.cancel()
        for running in list(self._attempts.values()):
            running.fail(ReplicaLost("the server is shutting down"))
        await self._mail.close()

    async def status(self) -> Status:
        """Return what the leading scheduler knows now. Raises ReplicaLost when it does not answer."""
        if not (scheduler := self._schedulers.first):
            raise ReplicaLost("the scheduler is not known yet")
        return await self._questions.ask(scheduler, AskStatus, "the scheduler")

    async def drop_caches(self) -> dict[str, DroppedBlocks]:
        """Have every instance give up its prefix cache, and return what each has dropped, by address. Raises ReplicaLost, naming
        one that does not answer."""
        addresses = [instance.address for instance in (await self.status()).instances]
        asked = [self._questions.ask(one, DropCache, f"the instance {one}") for one in addresses]
        answers = await asyncio.gather(*asked)
        return {address: answer.blocks for address, answer in zip(addresses, answers, strict=True)}

    async def ready(self) -> tuple[bool, str]:
        """Return whether a request would be answered, and if not, why."""
        if self._retiring:
            return False, "shutting down"
        try:
            status = await self.status()
        except ReplicaLost as error:
            return False, str(error)
        why_not = status.why_not or self.adapters.why_not
        return not why_not, why_not

    async def generate(
        self, request: Request, shared: SharedPrompt | None = None
    ) -> AsyncGenerator[TokenOut, None]:
        """Yield the request's tokens, in order, each once. Closing the iterator cancels the request everywhere. `shared`: one for
        all requests of a prompt, which is computed and handed over once.

        Raises Overloaded, RequestError, or ReplicaLost when the request could not be finished in time or anywhere."""
        request = self.adapters.renewed(request)
        with self._observed(request) as timeline:
            async for token in self._generate(request, timeline, shared):
                timeline.num_output += 1
                yield token

    async def search(self, request: Request, params: BeamParams, count: int) -> Found:
        """The `count` best answers that a beam search finds (`search_steps.search`). Raises as `generate` does."""
        request = self.adapters.renewed(request)
        with self._observed(request) as whole:

            async def draw(step: Request, shared: SharedPrompt) -> TokenOut:
                timeline = Timeline(request=request, started_s=whole.started_s)
                try:
                    async with contextlib.aclosing(self._generate(step, timeline, shared)) as tokens:
                        return await anext(tokens)
                finally:
                    whole.attempts += [one for one in timeline.attempts if one.lost or not whole.attempts]

            found = await search(request, params, count, draw, self.new_request_id)
            whole.num_output = len(found.beams[0])
            return found

    @contextlib.contextmanager
    def _observed(self, request: Request) -> Generator[Timeline]:
        """The request's timeline, of which the observers hear at its end."""
        timeline = Timeline(request=request, started_s=self._clock.now())
        try:
            with self.adapters.running(request.adapter):
                yield timeline
        except BatonError as error:
            timeline.error, timeline.error_type = str(error), type(error).__name__
            raise
        finally:
            timeline.ended_s = self._clock.now()
            self._observe(timeline)

    async def _generate(
        self, request: Request, timeline: Timeline, shared: SharedPrompt | None
    ) -> AsyncGenerator[TokenOut, None]:
        deadline = timeline.started_s + self._timeout_s
        fruitless, exclude, moved = 0, (), ("", "")
        brings = shared if shared is not None and await shared.must_bring() else None
        if shared is not None and brings is None:
            request = replace(request, sibling=shared.sibling, slo=shared.slo or request.slo)
            moved = shared.home, shared.home
        while True:
            num_before = len(request.emitted)
            running = self._begin(request, is_whole=request.id == timeline.request.id)
            running.brings, brings = brings, None
            timeline.attempts.append(running.record)
            emitted = list(request.emitted)
            finished = False
            try:
                place = self._place(request, exclude, source=moved[0], prefer=moved[1])
                if running.brings is not None:
                    # The others want the KV at a decode instance, and go on from it for as long as they may.
                    place = replace(place, max_new_tokens=max(2, timeline.request.sampling.max_tokens))
                await running.pause(fruitless, deadline - self._clock.now())
                async for token in self._attempt(running, place, deadline):
                    emitted.append(token.token)
                    finished = token.finish is not None
                    yield token
                if finished:
                    return
            except Moved as left:
                running.record.lost = str(left)
                exclude, moved = (*exclude, str(left))[-4:], (str(left), running.moved_to)
            except Lost as lost:
                running.record.lost = str(lost)
                exclude, moved = (*exclude, str(lost))[-4:], ("", "")
                if shared is not None:
                    shared.lost(str(lost))
                log.warning(
                    "request %s attempt %d: lost %s; it goes on elsewhere", request.id, request.attempt, lost
                )
            finally:
                self._end(running, finished)
            fruitless = 0 if len(emitted) > num_before else fruitless + 1
            if fruitless >= _MAX_FRUITLESS_ATTEMPTS:
                raise ReplicaLost(
                    f"{fruitless} instances in a row were lost before the next token; giving up"
                )
            request = running.request.retry(tuple(emitted))

    async def _attempt(
        self, running: RunningAttempt, place: Place, deadline: float
    ) -> AsyncGenerator[TokenOut, None]:
        running.wanted = place
        self._ask(running)
        try:
            async with asyncio.timeout(self._config.max_queue_wait_s + _GRACE_S):
                while running.route is None:
                    await running.wait()
                    if running.failure:
                        raise running.failure
        except TimeoutError:
            raise Overloaded("the scheduler did not find a place in time", retry_after_s=1.0) from None
        self._mail.send(running.route.decode, Submit(running.request, running.route))
        late = ReplicaLost(f"the request took longer than {self._timeout_s:g} s")
        with running.fails_in(deadline - self._clock.now(), late):
            while True:
                while running.ready:
                    token = running.ready.popleft()
                    if token.finish is not None:
                        await self._see_it_arrive(running)
                    yield token
                    if token.finish is not None:
                        return
                if running.failure:
                    raise running.failure
                await running.wait()

    async def _see_it_arrive(self, running: RunningAttempt) -> None:
        """The prefill instance may have drawn every token: those that share the prompt follow once its KV is at decode."""
        while running.brings is not None and running.failure is None:
            await running.wait()

    def _begin(self, request: Request, *, is_whole: bool) -> RunningAttempt:
        running = self._attempts[request.key] = RunningAttempt(request, self._clock, is_whole=is_whole)
        return running

    def _end(self, running: RunningAttempt, finished: bool) -> None:
        request = running.request
        running.record.ended_s = self._clock.now()
        del self._attempts[request.key]
        if running.brings is not None:
            running.brings.give_up()
        if running.route is not None and not finished:
            self._mail.send(running.route.decode, Cancel(request.id, request.attempt))
        if running.scheduler in self._schedulers.living:
            num_output = len(running.known) - len(request.emitted)
            complete = finished and running.is_whole
            self._mail.send(running.scheduler, Finished(request.id, request.attempt, num_output, complete))

    def _leave(self, address: str) -> None:
        """Move what an instance, which will end, generates for us."""
        for running in self._attempts.values():
            if running.route is not None and running.route.decode == address:
                move = asyncio.create_task(self._move(running, address))
                self._moves.add(move)
                move.add_done_callback(self._moves.discard)

    async def _move(self, running: RunningAttempt, leaving: str) -> None:
        """Migrate live: a copy of the KV goes elsewhere while tokens go on; then the rest is done between two tokens.

        The copy is made by a request of one token for all that is known so far, whose KV comes from the instance that ends. What
        it leaves in the other's prefix cache is what the next attempt finds there: whole blocks, and a recurrent state if it
        stands where a block ends."""
        request, known = running.request, running.whole_blocks(self._block_size)
        if len(running.known) + 1 >= request.sampling.max_tokens:
            return
        sampling = replace(request.sampling, max_tokens=len(known) + 1)
        copy = replace(request, id=f"{request.id}~", emitted=known, sampling=sampling)
        place = self._place(copy, (leaving,), source=leaving)
        copying, finished = self._begin(copy, is_whole=False), False
        try:
            async for token in self._attempt(copying, place, self._clock.now() + self._timeout_s):
                finished = token.finish is not None
        except (Lost, BatonError) as error:
            log.info("request %s stays on %s, which ends: %s", request.id, leaving, error)
        finally:
            self._end(copying, finished)
        if finished and copying.route is not None:
            running.moved_to = copying.route.decode
            running.fail(Moved(leaving))

    def _place(
        self, request: Request, exclude: tuple[str, ...] = (), *, source: str = "", prefer: str = ""
    ) -> Place:
        return Place(
            request_id=request.id,
            attempt=request.attempt,
            num_tokens=len(request.tokens),
            max_new_tokens=request.sampling.max_tokens - len(request.emitted),
            block_hashes=block_hashes(request.tokens, self._block_size, request.prefix_salt)
            if request.reuses_prefix
            else (),
            slo=request.slo,
            exclude=exclude,
            source=source,
            prefer=prefer,
            tenant=request.tenant,
            weight=request.weight,
        )

    def _on_message(self, sender: str, message: Message) -> None:
        match message:
            case Tokens(tokens):
                for token in tokens:
                    if (running := self._attempts.get(token.key)) is not None:
                        running.receive(token)
                        running.hear_from(sender)
            case Placed():
                self._on_placed(sender, message)
            case Rejected(request_id, attempt):
                self._fail(request_id, attempt, refusal_of(message))
            case Failed(request_id, attempt, reason, retryable):
                self._fail(request_id, attempt, Lost(sender) if retryable else RequestError(reason))
            case HandedOver(request_id, attempt):
                if (running := self._attempts.get(f"{request_id}#{attempt}")) is not None:
                    running.record.handed_over = message
            case Leaving(address):
                self._leave(address)
            case AdapterList():
                self.adapters.hear(message)
            case Status() | CacheDropped() | AdapterChanged():
                self._questions.answered(message)
            case _:
                log.error("%s is not for a frontend (from %s)", type(message).__name__, sender)

    def _ask(self, running: RunningAttempt) -> None:
        """Ask one of the schedulers for a place, requests in turn, or later, where no scheduler is known. One that was asked and
        lost may come back, and knows nothing of it then."""
        if running.wanted is None:
            return
        living = self._schedulers.living
        running.scheduler = living[crc32(running.request.id.encode()) % len(living)] if living else ""
        if living:
            self._mail.send(running.scheduler, running.wanted)

    def _on_scheduler(self, address: str) -> None:
        self.adapters.greet(address)
        self._ask_all()

    def _ask_all(self) -> None:
        """Ask for all attempts whose scheduler was lost, or that never had one."""
        for running in self._attempts.values():
            if running.route is None and running.scheduler not in self._schedulers.living:
                self._ask(running)

    def _on_placed(self, scheduler: str, placed: Placed) -> None:
        """Take a placement. One that no attempt here asked this scheduler for is given back to it."""
        running = self._attempts.get(f"{placed.request_id}#{placed.attempt}")
        if running is None or running.scheduler != scheduler:
            self._mail.send(scheduler, Finished(placed.request_id, placed.attempt))
        elif running.route is None:
            running.place(placed.route, placed.slo)

    def _fail(self, request_id: str, attempt: int, failure: Exception) -> None:
        if (running := self._attempts.get(f"{request_id}#{attempt}")) is not None:
            running.fail(failure)

    def _on_lost(self, peer: str) -> None:
        self._questions.lost(peer)
        if self._schedulers.lose(peer):
            self._ask_all()
        for running in self._attempts.values():
            if running.route is not None and running.route.decode == peer:
                running.fail(Lost(peer))
