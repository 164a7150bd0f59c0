"""The tokens of one request, whichever attempts they come from.

Invariant: a client sees output token i exactly once, after token i-1, whatever was lost, doubled or reordered on the way."""

import logging
from dataclasses import replace

from cluster.ingress.delivery.attempts import Attempts
from cluster.ingress.delivery.running_attempt import Lost, Moved, RunningAttempt
from cluster.ingress.delivery.shared_prompt import SharedPrompt
from cluster.ingress.telemetry.timeline import Timeline
from core.errors import ReplicaLost
from core.types import Request, Resumption, TokenId, TokenOut

log = logging.getLogger(__name__)

_MAX_FRUITLESS_ATTEMPTS = 5


class Delivery:
    """Starts the request over elsewhere when an instance is lost. Call `close` at its end, whatever has ended it."""

    def __init__(
        self, request: Request, attempts: Attempts, timeline: Timeline, shared: SharedPrompt | None
    ) -> None:
        """`timeline` gets the attempts; its request may be one of which this is a part. `shared`: one for all requests of a
        prompt."""
        self._request, self._attempts, self._timeline, self._shared = request, attempts, timeline, shared
        self._deadline = timeline.started_at + attempts.timeout_s
        self._running: RunningAttempt | None = None
        self._num_fruitless = 0
        self._exclude: tuple[str, ...] = ()
        self._source = self._prefer = ""
        """The instance that has KV of it, and the one where it should go on."""
        self._past: list[TokenOut] | None = None
        """What was taken; None where the request cannot be resumed."""
        self._kept: list[TokenOut] = []
        """What an earlier attempt, which does not run any more, has left."""
        if request.resumption is not None:
            self._past, self._kept = [*request.resumption.past], [*request.resumption.past]
            self._request = self._next(request, ()) if self._kept else request

    async def take(self) -> list[TokenOut]:
        """Wait for tokens, and return all that are here, each once, in order. Returns none behind the last. Raises Overloaded,
        RequestError, or ReplicaLost when the request could not be finished in time or anywhere."""
        if kept := self._kept:
            self._kept = []
            return kept
        while True:
            if self._running is None and self._past and self._past[-1].finish is not None:
                return []
            try:
                running = self._running or await self._begin()
                taken = await running.take()
            except Lost as lost:
                self._lose(lost)
                continue
            if self._past is not None:
                self._past += taken
            return taken

    def close(self) -> None:
        """End the request everywhere. Idempotent."""
        if self._running is not None:
            self._attempts.end(self._running)
            self._running = None

    async def _begin(self) -> RunningAttempt:
        shared, is_first = self._shared, not self._timeline.attempts
        if (resumption := self._request.resumption) is not None and resumption.held_by:
            return self._attached(resumption)
        brings = shared if shared is not None and is_first and await shared.must_bring() else None
        if shared is not None and is_first and brings is None:
            self._source = self._prefer = shared.home
            self._request = replace(
                self._request, sibling=shared.sibling, slo=shared.slo or self._request.slo
            )
        request = self._request
        whole = self._timeline.request
        running = self._running = self._attempts.begin(request, is_whole=request.id == whole.id)
        running.brings = brings
        self._timeline.attempts.append(running.record)
        place = self._attempts.place(request, self._exclude, source=self._source, prefer=self._prefer)
        if brings is not None:
            # The others want the KV at a decode instance, and go on from it for as long as they may.
            place = replace(place, max_new_tokens=max(2, whole.sampling.max_tokens))
        await running.pause(self._num_fruitless, self._deadline)
        await self._attempts.start(running, place, self._deadline)
        return running

    def _attached(self, resumption: Resumption) -> RunningAttempt:
        running = self._running = self._attempts.begin(self._request, is_whole=False)
        self._timeline.attempts.append(running.record)
        self._attempts.attach(running, resumption.held_by, resumption.owner, self._deadline)
        return running

    def _next(self, request: Request, known: tuple[TokenId, ...]) -> Request:
        """Return the attempt after `request`, which goes on behind the tokens that are known."""
        if self._past is None or request.resumption is None:
            return request.retry(known)
        resumption = replace(request.resumption, past=tuple(self._past), held_by="")
        emitted = tuple(token.token for token in self._past)
        return replace(request.retry(emitted), resumption=resumption)

    def _lose(self, lost: Lost) -> None:
        """Prepare the next attempt. Raises ReplicaLost where there shall be none."""
        running = self._running
        assert running is not None
        request, address = running.request, str(lost)
        running.record.lost = address
        self._exclude = (*self._exclude, address)[-4:]
        self._source, self._prefer = (address, running.moved_to) if isinstance(lost, Moved) else ("", "")
        if not isinstance(lost, Moved):
            if self._shared is not None:
                self._shared.lost(address)
            log.warning(
                "request %s attempt %d: lost %s; it goes on elsewhere", request.id, request.attempt, address
            )
        self.close()
        has_new = len(running.known) > len(request.emitted)
        self._num_fruitless = 0 if has_new else self._num_fruitless + 1
        if self._num_fruitless >= _MAX_FRUITLESS_ATTEMPTS:
            raise ReplicaLost(
                f"{self._num_fruitless} instances in a row were lost before the next token; giving up"
            )
        self._request = self._next(request, tuple(running.known))
