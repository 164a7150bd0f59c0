"""The frontends that read each attempt's tokens, and the tokens that are kept for those that may yet ask for them.

Invariant: an attempt that may be resumed has every token of its request while it is kept, whoever reads it."""

import asyncio
import heapq
import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace

from core.messages import Failed, Message, Tokens
from core.ports import Clock, Mail
from core.stream_messages import (
    ANOTHER_REQUEST,
    AttachReader,
    DetachReader,
    FindStream,
    KeptSequence,
    StreamFound,
    UsageNoted,
    are_different,
)
from core.types import Request, Resumption, TokenOut

log = logging.getLogger(__name__)

MAX_SEQUENCES, MAX_BYTES = 1024, 64 << 20
"""What an owner's sequences that nobody reads may be and have. Those that nobody has read for longest make room."""
_TOKEN_BYTES, _LIKELY_BYTES = 200, 120
"""About what a token takes, and each likely one that is named with it."""


@dataclass(slots=True, eq=False)
class _Output:
    request_id: str
    attempt: int
    frontends: list[str]
    resumption: Resumption | None
    tokens: list[TokenOut] = field(default_factory=list[TokenOut])
    """None are kept of what cannot be resumed."""
    num_sent: int = 0
    """How many of them the last frontend had, once none reads them."""
    num_noted: int = 0
    """How many are in the ledger of usage."""
    noting: set[str] = field(default_factory=set[str])
    """Frontends that have read it, and have not said yet what they noted."""
    runs: bool = True
    expires_at: float = 0.0

    @property
    def key(self) -> str:
        return f"{self.request_id}#{self.attempt}"

    @property
    def num_bytes(self) -> int:
        """About what it takes, from its first token, as the others have as many likely ones."""
        record = len(self.resumption.record) if self.resumption is not None else 0
        if not self.tokens:
            return record
        top, scores = self.tokens[0].top, self.tokens[0].prompt_scores
        likely = len(self.tokens) * len(top) + sum(1 + len(score.top) for score in scores)
        return record + _TOKEN_BYTES * len(self.tokens) + _LIKELY_BYTES * likely

    def described(self) -> KeptSequence:
        return KeptSequence(
            request_id=self.request_id,
            attempt=self.attempt,
            num_sent=max(self.num_sent, len(self.tokens) if self.frontends else 0),
            num_noted=max(self.num_noted, len(self.tokens) if self.noting else 0),
            runs=self.runs,
            tokens=() if self.runs else tuple(self.tokens),
        )


@dataclass(slots=True)
class _Unread:
    """What nobody reads of one owner's, with its bytes, the longest first."""

    sizes: dict[str, int] = field(default_factory=dict[str, int])
    num_bytes: int = 0

    def add(self, key: str, num_bytes: int) -> None:
        self.remove(key)
        self.sizes[key] = num_bytes
        self.num_bytes += num_bytes

    def remove(self, key: str) -> None:
        self.num_bytes -= self.sizes.pop(key, 0)


class Readers:
    """Every attempt is opened, and closed when no more of its tokens come."""

    def __init__(self, mail: Mail, clock: Clock, end: Callable[[str], None]) -> None:
        """`end` is called for an attempt that nobody came back for: it has to be closed."""
        self._mail, self._clock, self._end = mail, clock, end
        self._outputs: dict[str, _Output] = {}
        self._unread: dict[str, _Unread] = {}
        """By owner."""
        self._expiring: list[tuple[float, str]] = []
        self._expiry: asyncio.Task[None] | None = None

    @property
    def frontends(self) -> set[str]:
        return {frontend for output in self._outputs.values() for frontend in output.frontends}

    def open(self, request: Request) -> bool:
        """Let the frontend of a request read it. Returns False where the attempt is here already: it has one reader more then, if
        it is the same request."""
        resumption = request.resumption
        if (begun := self._outputs.get(request.key)) is not None:
            if are_different(begun.resumption, resumption):
                failed = Failed(request.id, request.attempt, ANOTHER_REQUEST, retryable=False)
                self._mail.send(request.reply_to, failed)
            elif resumption is not None:
                self._attach(request.reply_to, AttachReader(request.id, request.attempt, resumption.owner))
            return False
        output = _Output(
            request.id, request.attempt, [request.reply_to], resumption, noting={request.reply_to}
        )
        if resumption is not None:
            output.tokens = [replace(token, attempt=request.attempt) for token in resumption.past]
            output.resumption = replace(resumption, past=())
        self._outputs[request.key] = output
        return True

    def send(self, tokens: Iterable[TokenOut]) -> None:
        """Send open attempts' tokens, in one message for each frontend."""
        by_frontend: dict[str, list[TokenOut]] = {}
        for token in tokens:
            output = self._outputs[token.key]
            if output.resumption is not None and token.index == len(output.tokens):
                output.tokens.append(token)
            for frontend in output.frontends:
                by_frontend.setdefault(frontend, []).append(token)
        for frontend, batch in by_frontend.items():
            self._mail.send(frontend, Tokens(tuple(batch)))

    def tell(self, request: Request, message: Message) -> None:
        """Send a message about an open attempt to whoever reads it."""
        output = self._outputs.get(request.key)
        for frontend in output.frontends if output is not None else ():
            self._mail.send(frontend, message)

    def close(self, key: str) -> None:
        """No more of its tokens come. Idempotent."""
        output = self._outputs.get(key)
        if output is None or not output.runs:
            return
        output.runs = False
        if output.resumption is None:
            del self._outputs[key]
        else:
            self._leave(output)

    def lose(self, frontend: str) -> list[str]:
        """Return the attempts that nobody can read any more, now that a frontend is lost."""
        ended: list[str] = []
        for key, output in list(self._outputs.items()):
            output.noting.discard(frontend)
            if frontend not in output.frontends:
                continue
            if output.frontends != [frontend]:
                output.frontends.remove(frontend)
            elif output.resumption is None:
                ended.append(key)
            else:
                self._leave(output)
        return ended

    def on_message(self, sender: str, message: Message) -> bool:
        """Handle a message. Returns True when it was for this part."""
        match message:
            case AttachReader():
                self._attach(sender, message)
            case DetachReader(request_id, attempt):
                self._detach(sender, f"{request_id}#{attempt}")
            case UsageNoted(request_id, attempt, num_tokens):
                self._note(sender, f"{request_id}#{attempt}", num_tokens)
            case FindStream():
                self._find(sender, message)
            case _:
                return False
        return True

    def shut(self) -> None:
        if self._expiry is not None:
            self._expiry.cancel()

    def _detach(self, frontend: str, key: str) -> None:
        """Let a frontend read an attempt no more. Without any other the attempt ends, and its tokens are kept."""
        output = self._outputs.get(key)
        if output is None or frontend not in output.frontends:
            return
        if output.frontends == [frontend]:
            self._end(key)
        else:
            output.frontends.remove(frontend)

    def _note(self, frontend: str, key: str, num_tokens: int) -> None:
        if (output := self._outputs.get(key)) is not None:
            output.noting.discard(frontend)
            output.num_noted = max(output.num_noted, num_tokens)

    def _attach(self, frontend: str, attach: AttachReader) -> None:
        """Let a frontend read an attempt, too, from its first token on."""
        output = self._outputs.get(f"{attach.request_id}#{attach.attempt}")
        if output is None or output.resumption is None or output.resumption.owner != attach.owner:
            self._refuse(frontend, attach)
            return
        output.noting.add(frontend)
        if output.runs and frontend not in output.frontends:
            output.frontends.append(frontend)
            self._stay(output)
        if output.tokens:
            self._mail.send(frontend, Tokens(tuple(output.tokens)))
        if not output.runs and not (output.tokens and output.tokens[-1].finish):
            self._refuse(frontend, attach)

    def _find(self, frontend: str, find: FindStream) -> None:
        """Answer what is here of a stream, to its owner alone."""
        found = [one for one in self._outputs.values() if _belongs(one, find)]
        resumed = next((one.resumption for one in found if one.resumption is not None), None)
        if resumed is None:
            self._mail.send(frontend, StreamFound(nonce=find.nonce))
            return
        record = next((r.record for one in found if (r := one.resumption) and r.record), b"")
        answer = StreamFound(
            nonce=find.nonce,
            sequences=tuple(one.described() for one in found),
            begun_at=resumed.begun_at,
            digest=resumed.digest,
            record=record,
        )
        self._mail.send(frontend, answer)

    def _refuse(self, frontend: str, attach: AttachReader) -> None:
        reason = "the instance has no more of this request"
        self._mail.send(frontend, Failed(attach.request_id, attach.attempt, reason, retryable=True))

    def _leave(self, output: _Output) -> None:
        """Keep what nobody reads for a while, within its owner's room."""
        assert output.resumption is not None
        if output.frontends:
            output.num_sent, output.frontends = len(output.tokens), list[str]()
        output.expires_at = self._clock.now() + output.resumption.keep_s
        heapq.heappush(self._expiring, (output.expires_at, output.key))
        unread = self._unread.setdefault(output.resumption.owner, _Unread())
        unread.add(output.key, output.num_bytes)
        while len(unread.sizes) > MAX_SEQUENCES or unread.num_bytes > MAX_BYTES:
            self._drop(self._outputs[next(iter(unread.sizes))])
        if self._expiry is None or self._expiry.done():
            self._expiry = asyncio.create_task(self._expire())

    def _stay(self, output: _Output) -> None:
        """Somebody reads it again."""
        assert output.resumption is not None
        output.expires_at = 0.0
        if (unread := self._unread.get(output.resumption.owner)) is not None:
            unread.remove(output.key)

    def _drop(self, output: _Output) -> None:
        """Forget an attempt that nobody reads, and end it where it runs."""
        self._stay(output)
        output.resumption = None
        if output.runs:
            log.info("request %s ends: nobody has come back for it", output.request_id)
            self._end(output.key)
        else:
            del self._outputs[output.key]

    async def _expire(self) -> None:
        while self._expiring:
            expires_at, key = self._expiring[0]
            if (left_s := expires_at - self._clock.now()) > 0:
                await self._clock.sleep(left_s)
                continue
            heapq.heappop(self._expiring)
            output = self._outputs.get(key)
            if output is not None and output.expires_at == expires_at:
                self._drop(output)


def _belongs(output: _Output, find: FindStream) -> bool:
    kept = output.resumption
    return kept is not None and kept.stream == find.stream and kept.owner == find.owner
