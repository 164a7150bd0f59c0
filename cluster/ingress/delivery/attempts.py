"""The attempts that one frontend runs: it has each placed, hands it to its instance, hears of it, and ends it everywhere."""

import asyncio
import logging
from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import chain
from zlib import crc32

from cluster.ingress.delivery.running_attempt import Lost, Moved, RunningAttempt
from core.config.cluster_config import ScheduleConfig
from core.errors import BatonError, Overloaded, ReplicaLost, RequestError, ShuttingDown
from core.kv import block_hashes
from core.messages import Cancel, Finished, HandedOver, PlaceReply, PlaceRequest, Submit
from core.ports import Clock, Mail
from core.stream_messages import (
    ANOTHER_REQUEST,
    MISMATCH,
    AttachReader,
    DetachReader,
    UsageNoted,
    are_different,
)
from core.types import Request, Route, TokenOut
from net.schedulers import Schedulers

log = logging.getLogger(__name__)

_GRACE_S = 5.0
"""How much longer than the scheduler's own limit the frontend waits for its answer."""


class Attempts:
    def __init__(
        self,
        mail: Mail,
        clock: Clock,
        config: ScheduleConfig,
        block_size: int,
        schedulers: Schedulers,
        *,
        timeout_s: float,
    ) -> None:
        """`timeout_s` is what a request may take at the most."""
        self._mail, self._clock, self._config = mail, clock, config
        self._block_size, self._schedulers, self.timeout_s = block_size, schedulers, timeout_s
        self._running: dict[str, list[RunningAttempt]] = {}
        """By key. Clients that wait for the same answer have one each."""
        self._moves: set[asyncio.Task[None]] = set()
        self._ended: dict[str, tuple[str, int]] = {}
        """By request that may be resumed and whose use is not written down yet: the instance of its last attempt, and that."""

    def __len__(self) -> int:
        return sum(map(len, self._running.values()))

    def begin(self, request: Request, *, is_whole: bool) -> RunningAttempt:
        """`is_whole` is as in `RunningAttempt`. The caller calls `end`. Raises RequestError where another request runs under its
        name."""
        running = RunningAttempt(request, self._clock, is_whole=is_whole)
        others = self._running.setdefault(request.key, [])
        if others and are_different(others[0].request.resumption, request.resumption):
            raise RequestError(ANOTHER_REQUEST, field="Idempotency-Key", status=422, code=MISMATCH)
        others.append(running)
        return running

    def place(
        self, request: Request, exclude: tuple[str, ...] = (), *, source: str = "", prefer: str = ""
    ) -> PlaceRequest:
        """Return what a scheduler is to be asked for."""
        return PlaceRequest(
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

    async def start(self, running: RunningAttempt, place: PlaceRequest, deadline: float) -> None:
        """Have it placed, and hand it to its instance. It fails at `deadline`. Raises Overloaded, or the attempt's failure.

        Only the scheduler knows how long a later attempt may wait: the model may have fallen asleep."""
        running.wanted = place
        self._ask(running)
        longest_s = self._config.max_queue_wait_s + _GRACE_S
        try:
            async with asyncio.timeout(deadline - self._clock.now() if place.attempt else longest_s):
                route = await running.placed()
        except TimeoutError:
            raise Overloaded("the scheduler did not find a place in time", retry_after_s=1.0) from None
        self._mail.send(route.decode, Submit(running.request, route))
        self._limit(running, deadline)

    def attach(self, running: RunningAttempt, instance: str, owner: str, deadline: float) -> None:
        """Read, too, what an instance generates already. It fails at `deadline`."""
        running.place(Route(instance), None)
        self._mail.send(instance, AttachReader(running.request.id, running.request.attempt, owner))
        self._limit(running, deadline)

    def _limit(self, running: RunningAttempt, deadline: float) -> None:
        late = ReplicaLost(f"the request took longer than {self.timeout_s:g} s")
        running.fail_in(deadline - self._clock.now(), late)

    def end(self, running: RunningAttempt) -> None:
        """End it everywhere, also before its last token."""
        running.end()
        request, others = running.request, self._running[running.request.key]
        others.remove(running)
        if others:  # which read what this one has had placed
            others[0].scheduler = others[0].scheduler or running.scheduler
            return
        del self._running[request.key]
        if running.route is not None:
            if request.resumption is not None:
                self._ended[request.id] = running.route.decode, request.attempt
            if not running.finished:
                leave = Cancel if request.resumption is None else DetachReader
                self._mail.send(running.route.decode, leave(request.id, request.attempt))
        if running.scheduler in self._schedulers.living:
            num_output = len(running.known) - len(request.emitted)
            complete = running.finished and running.is_whole
            self._mail.send(running.scheduler, Finished(request.id, request.attempt, num_output, complete))

    def noted(self, request: Request, num_tokens: int, kept_at: str) -> None:
        """See `FindsStreams`."""
        instance, attempt = self._ended.pop(request.id, (kept_at, request.attempt))
        if instance:
            self._mail.send(instance, UsageNoted(request.id, attempt, num_tokens))

    def receive(self, sender: str, tokens: Iterable[TokenOut]) -> None:
        for token in tokens:
            for running in self._running.get(token.key, ()):
                running.receive(token)
                running.hear_from(sender)

    def placed(self, scheduler: str, placed: PlaceReply) -> None:
        """Take a placement. One that no attempt here asked this scheduler for is given back to it."""
        asked = [one for one in self._named(placed) if one.scheduler == scheduler]
        if not asked:
            self._mail.send(scheduler, Finished(placed.request_id, placed.attempt))
        for running in asked:
            if running.route is None:
                running.place(placed.route, placed.slo)

    def handed_over(self, message: HandedOver) -> None:
        for running in self._named(message):
            running.record.handed_over = message

    def fail(self, request_id: str, attempt: int, failure: Exception) -> None:
        for running in self._running.get(f"{request_id}#{attempt}", ()):
            running.fail(failure)

    def lose(self, instance: str) -> None:
        """Let what an instance decoded, which is lost, go on elsewhere."""
        for running in self._all():
            if running.route is not None and running.route.decode == instance:
                running.fail(Lost(instance))

    def leave(self, instance: str) -> None:
        """Move what an instance, which will end, generates for us."""
        for running in self._all():
            if running.route is not None and running.route.decode == instance:
                move = asyncio.create_task(self._move(running, instance))
                self._moves.add(move)
                move.add_done_callback(self._moves.discard)

    def ask_all(self) -> None:
        """Ask for all attempts whose scheduler was lost, or that never had one."""
        for running in self._all():
            if running.route is None and running.scheduler not in self._schedulers.living:
                self._ask(running)

    def close(self) -> None:
        for move in self._moves:
            move.cancel()
        for running in self._all():
            running.fail(ShuttingDown("the server is shutting down"))

    def _named(self, message: PlaceReply | HandedOver) -> list[RunningAttempt]:
        return self._running.get(f"{message.request_id}#{message.attempt}", [])

    def _all(self) -> Iterator[RunningAttempt]:
        return chain.from_iterable(self._running.values())

    def _ask(self, running: RunningAttempt) -> None:
        """Ask one of the schedulers for a place, requests in turn, or later, where no scheduler is known. One that was asked and
        lost may come back, and knows nothing of it then."""
        if running.wanted is None:
            return
        placing = self._schedulers.placing
        running.scheduler = placing[crc32(running.request.id.encode()) % len(placing)] if placing else ""
        if placing:
            self._mail.send(running.scheduler, running.wanted)

    async def _move(self, running: RunningAttempt, leaving: str) -> None:
        """Migrate live: a copy of the KV goes elsewhere while tokens go on; then the rest is done between two tokens.

        The copy is made by a request of one token for all that is known so far, whose KV comes from the instance that ends. What
        it leaves in the other's prefix cache is what the next attempt finds there: whole blocks, and a recurrent state if it
        stands where a block ends."""
        request, known = running.request, running.whole_blocks(self._block_size)
        if len(running.known) + 1 >= request.sampling.max_tokens:
            return
        sampling = replace(request.sampling, max_tokens=len(known) + 1)
        copy = replace(request, id=f"{request.id}~", emitted=known, sampling=sampling, resumption=None)
        copying = self.begin(copy, is_whole=False)
        try:
            place = self.place(copy, (leaving,), source=leaving)
            await self.start(copying, place, self._clock.now() + self.timeout_s)
            while await copying.take():
                pass
        except (Lost, BatonError) as error:
            log.info("request %s stays on %s, which ends: %s", request.id, leaving, error)
        finally:
            self.end(copying)
        if copying.finished and copying.route is not None:
            running.moved_to = copying.route.decode
            running.fail(Moved(leaving))
