"""One attempt of one request, from placing to its last token, as the frontend sees it."""

import asyncio
import contextlib
from dataclasses import replace

from cluster.ingress.delivery.shared_prompt import SharedPrompt
from cluster.ingress.telemetry.timeline import Attempt
from core.errors import BatonError, ModelAsleep, Overloaded, RequestError, TargetOutOfReach
from core.messages import PlaceRequest, Rejected
from core.ports import Clock
from core.stream_messages import ANOTHER_REQUEST, MISMATCH
from core.types import Request, Route, Slo, TokenOut

FIRST_PAUSE_S, _GROWTH = 0.25, 4.0
"""Behind the second attempt without a token, and how many times as long behind each further one."""


class Lost(Exception):
    """This attempt is over, the request is not. Carries the instance to avoid."""


class Moved(Lost):
    """This attempt has stopped between two tokens; its KV is elsewhere already. Carries the instance that was left."""


class RunningAttempt:
    """One attempt of one request, from placing to its last token. One coroutine waits for it."""

    def __init__(self, request: Request, clock: Clock, *, is_whole: bool = True) -> None:
        """`is_whole`: its end is that of an answer, from which the scheduler learns how long answers are."""
        self.request, self._clock, self.is_whole = request, clock, is_whole
        self.wanted: PlaceRequest | None = None
        """What a scheduler is asked for."""
        self.scheduler = ""
        """The scheduler that was asked last."""
        self.route: Route | None = None
        self.record = Attempt(number=request.attempt, started_at=clock.now())
        self.known = list(request.emitted)
        """All output tokens, from every attempt."""
        self.finished = False
        """Whether the last token is known."""
        self.failure: Exception | None = None
        self.moved_to = ""
        """The instance that has a copy of its KV."""
        self.brings: SharedPrompt | None = None
        """Where the others wait until this attempt has brought the KV of their prompt to its decode instance."""
        self._ready: list[TokenOut] = []
        """Known tokens that nobody has taken."""
        self._early: dict[int, TokenOut] = {}
        self._came_at = 0.0
        self._waiting: asyncio.Future[None] | None = None
        self._timer: asyncio.TimerHandle | None = None

    def receive(self, token: TokenOut) -> None:
        """Take a token. Token 0 comes from prefill and the others from decode: on different connections, so in any order."""
        if token.index != len(self.known):
            if token.index > len(self.known):
                self._early[token.index] = token
            return
        following: TokenOut | None = token
        while following is not None:
            self._ready.append(following)
            self.known.append(following.token)
            self.finished = following.finish is not None
            following = self._early.pop(len(self.known), None) if self._early else None
        now, record = self._clock.now(), self.record
        if record.first_token_at is None:
            record.first_token_at = now
        elif now - self._came_at > record.longest_gap_s:
            record.longest_gap_s = now - self._came_at
        self._came_at = now
        self._wake()

    async def take(self) -> list[TokenOut]:
        """Wait for tokens, and return all that are here, each once, in order. Returns none behind the last. Raises the failure
        where those before it are taken.

        The last one waits for what is to be brought: the prefill instance may have sampled every token, and those that share the
        prompt follow once its KV is at decode."""
        while self.failure is None and (self.brings is not None if self.finished else not self._ready):
            await self._change()
        taken, self._ready = self._ready, []
        if self.failure is not None and not taken and not self.finished:
            raise self.failure
        return taken

    def hear_from(self, sender: str) -> None:
        """A token has come from there: if that is the decode instance, the prompt's KV is there as well."""
        if self.brings is not None and self.route is not None and sender == self.route.decode:
            self.brings.arrived(sender, self.request)
            self.brings = None
            self._wake()

    def whole_blocks(self, block_size: int) -> tuple[int, ...]:
        """Return what is known of the output, without the tokens behind the last full block, as far as there are blocks of
        output."""
        num_tokens = len(self.request.prompt) + len(self.known)
        num_kept = len(self.known) - num_tokens % block_size
        return tuple(self.known[: num_kept if num_kept > 0 else None])

    def fail(self, failure: Exception) -> None:
        self.failure = self.failure or failure
        self._wake()

    def fail_in(self, seconds: float, failure: Exception) -> None:
        """Fail so many seconds from now, unless `end` comes before that. One timer serves all of its waits."""
        self._timer = asyncio.get_running_loop().call_later(max(0.0, seconds), self.fail, failure)

    def end(self) -> None:
        self.record.ended_at = self._clock.now()
        if self._timer is not None:
            self._timer.cancel()
        if self.brings is not None:
            self.brings.give_up()

    def place(self, route: Route, slo: Slo | None) -> None:
        """Take the scheduler's decision over: where it runs, and by which class if that is another one."""
        self.request = replace(self.request, slo=slo or self.request.slo)
        self.route = self.record.route = route
        self.record.placed_at = self._clock.now()
        self._wake()

    async def placed(self) -> Route:
        """Wait for the scheduler's decision. Raises the attempt's failure."""
        while self.route is None and self.failure is None:
            await self._change()
        if self.failure is not None:
            raise self.failure
        assert self.route is not None
        return self.route

    async def pause(self, num_fruitless: int, deadline: float) -> None:
        """Wait before it begins behind so many that brought no token, until `deadline` at the most. The first lost instance is
        left at once. Where the next was lost, too, whoever is left may be stalled, and answer a few seconds later. Raises the
        attempt's failure."""
        if num_fruitless < 2:
            return
        pause_s = min(FIRST_PAUSE_S * _GROWTH ** (num_fruitless - 2), deadline - self._clock.now())
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(max(0.0, pause_s)):
                while self.failure is None:
                    await self._change()
        if self.failure is not None:
            raise self.failure

    async def _change(self) -> None:
        self._waiting = asyncio.get_running_loop().create_future()
        try:
            await self._waiting
        finally:
            self._waiting = None

    def _wake(self) -> None:
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_result(None)


def refusal_of(rejected: Rejected) -> BatonError:
    """Return the error that says why no place will come."""
    if rejected.asleep:
        return ModelAsleep(rejected.reason, rejected.retry_after_s)
    if rejected.possible_ttft_s > 0:
        return TargetOutOfReach(rejected.reason, rejected.possible_ttft_s)
    if rejected.retry_after_s > 0:
        return Overloaded(rejected.reason, rejected.retry_after_s)
    return RequestError(rejected.reason)


def failure_of(reason: str) -> RequestError:
    """Return the error that says why no instance will do it."""
    if reason == ANOTHER_REQUEST:
        return RequestError(reason, field="Idempotency-Key", status=422, code=MISMATCH)
    return RequestError(reason)
