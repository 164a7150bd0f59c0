"""One attempt of one request, from placing to its last token, as the frontend sees it."""

import asyncio
import contextlib
from collections import deque
from collections.abc import Generator
from dataclasses import replace

from cluster.ingress.shared_prompt import SharedPrompt
from cluster.ingress.timeline import Attempt
from core.errors import BatonError, Overloaded, RequestError, TargetOutOfReach
from core.messages import Place, Rejected
from core.ports import Clock
from core.types import Request, Route, Slo, TokenOut

_FIRST_PAUSE_S, _GROWTH = 0.25, 4.0
"""Behind the second attempt without a token, and how many times as long behind each further one."""


class Lost(Exception):
    """This attempt is over, the request is not. Carries the instance to avoid."""


class Moved(Lost):
    """This attempt has stopped between two tokens; its KV is elsewhere already. Carries the instance that was left."""


class RunningAttempt:
    """One attempt of one request, from placing to its last token. Owned by the coroutine in `generate`."""

    def __init__(self, request: Request, clock: Clock, *, is_whole: bool = True) -> None:
        """`is_whole`: its end is that of an answer, from which the scheduler learns how long answers are."""
        self.request, self._clock, self.is_whole = request, clock, is_whole
        self.wanted: Place | None = None
        """What a scheduler is asked for."""
        self.scheduler = ""
        """The scheduler that was asked last."""
        self.route: Route | None = None
        self.record = Attempt(number=request.attempt, started_s=clock.now())
        self.known = list(request.emitted)
        """All output tokens, from every attempt."""
        self.ready: deque[TokenOut] = deque()
        self.early: dict[int, TokenOut] = {}
        self.failure: Exception | None = None
        self.changed = asyncio.Event()
        self.moved_to = ""
        """The instance that has a copy of its KV."""
        self.brings: SharedPrompt | None = None
        """Where the others wait until this attempt has brought the KV of their prompt to its decode instance."""

    def receive(self, token: TokenOut) -> None:
        """Take a token. Token 0 comes from prefill and the others from decode: on different connections, so in any order."""
        if token.index < len(self.known):
            return
        self.early[token.index] = token
        while (following := self.early.pop(len(self.known), None)) is not None:
            self.ready.append(following)
            self.known.append(following.token)
        if self.ready:
            if self.record.first_token_s is None:
                self.record.first_token_s = self._clock.now()
            self.changed.set()

    def hear_from(self, sender: str) -> None:
        """A token has come from there: if that is the decode instance, the prompt's KV is there as well."""
        if self.brings is not None and self.route is not None and sender == self.route.decode:
            self.brings.arrived(sender, self.request)
            self.brings = None
            self.changed.set()

    def whole_blocks(self, block_size: int) -> tuple[int, ...]:
        """Return what is known of the output, without the tokens behind the last full block, as far as there are blocks of
        output."""
        num_tokens = len(self.request.prompt) + len(self.known)
        num_kept = len(self.known) - num_tokens % block_size
        return tuple(self.known[: num_kept if num_kept > 0 else None])

    def fail(self, failure: Exception) -> None:
        self.failure = self.failure or failure
        self.changed.set()

    @contextlib.contextmanager
    def fails_in(self, seconds: float, failure: Exception) -> Generator[None]:
        """Fail so many seconds from now, unless the block is left before that. One timer serves all of its waits."""
        timer = asyncio.get_running_loop().call_later(max(0.0, seconds), self.fail, failure)
        try:
            yield
        finally:
            timer.cancel()

    def place(self, route: Route, slo: Slo | None) -> None:
        """Take the scheduler's decision over: where it runs, and by which class if that is another one."""
        self.request = replace(self.request, slo=slo or self.request.slo)
        self.route = self.record.route = route
        self.record.placed_s = self._clock.now()
        self.changed.set()

    async def pause(self, num_fruitless: int, most_s: float) -> None:
        """Wait before it begins behind so many that brought no token. The first lost instance is left at once. Where the next was
        lost, too, whoever is left may be stalled, and answer a few seconds later. Raises the attempt's failure."""
        if num_fruitless < 2:
            return
        pause_s = _FIRST_PAUSE_S * _GROWTH ** (num_fruitless - 2)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(max(0.0, min(pause_s, most_s))):
                await self.wait()
        if self.failure:
            raise self.failure

    async def wait(self) -> None:
        await self.changed.wait()
        self.changed.clear()


def refusal_of(rejected: Rejected) -> BatonError:
    """Return the error that says why no place will come."""
    if rejected.possible_ttft_s > 0:
        return TargetOutOfReach(rejected.reason, rejected.possible_ttft_s)
    if rejected.retry_after_s > 0:
        return Overloaded(rejected.reason, rejected.retry_after_s)
    return RequestError(rejected.reason)
