"""Requests of which nothing follows the step that computes their prompt: answered where prompts are computed.

Their KV has no use elsewhere, so nothing is granted and nothing is handed over. Decode instances do the same by themselves."""

from collections.abc import Sequence

from core.errors import RequestError
from core.messages import Cancel, Failed, Message, Submit, Tokens
from core.plan import FailedSeq
from core.ports import Mail
from core.types import Request, TokenOut
from engine.loop import Engine


class PromptWorker:
    """Reacts to messages and engine output; owns the requests in progress."""

    def __init__(self, mail: Mail, engine: Engine) -> None:
        self._mail, self._engine = mail, engine
        self._requests: dict[str, Request] = {}

    @property
    def num_jobs(self) -> int:
        return len(self._requests)

    @property
    def adapters(self) -> set[str]:
        """The adapters of the requests that are here."""
        return {request.adapter for request in self._requests.values()}

    def on_message(self, message: Message) -> bool:
        """True when the message was for this role."""
        match message:
            case Submit(request):
                self._submit(request)
            case Cancel(request_id, attempt):
                self._cancel(f"{request_id}#{attempt}")
            case _:
                return False
        return True

    def on_lost(self, peer: str) -> None:
        """Nobody reads the answers to a frontend that died."""
        for key, request in list(self._requests.items()):
            if request.reply_to == peer:
                self._cancel(key)

    def on_tokens(self, tokens: list[TokenOut]) -> None:
        """A step's output: one message for each frontend."""
        by_frontend: dict[str, list[TokenOut]] = {}
        for token in tokens:
            request = self._requests.get(token.key)
            if request is None:
                continue
            by_frontend.setdefault(request.reply_to, []).append(token)
            if token.finish is not None:
                del self._requests[token.key]
        for frontend, batch in by_frontend.items():
            self._mail.send(frontend, Tokens(tuple(batch)))

    def on_failed(self, failed: Sequence[FailedSeq]) -> None:
        """A step could not compute these, nor could another instance's."""
        for failure in failed:
            if (request := self._requests.pop(failure.key, None)) is not None:
                self._fail(request, failure.reason, retryable=False)

    def fail_all(self, reason: str) -> None:
        """The engine has stopped: somebody else may answer these."""
        for key, request in list(self._requests.items()):
            self._fail(request, reason, retryable=True)
            self._cancel(key)

    def _submit(self, request: Request) -> None:
        if request.key in self._requests:
            return
        try:
            self._engine.add(request)
        except RequestError as error:
            self._fail(request, str(error), retryable=False)
            return
        self._requests[request.key] = request

    def _cancel(self, key: str) -> None:
        if self._requests.pop(key, None) is not None:
            self._engine.abort(key)

    def _fail(self, request: Request, reason: str, *, retryable: bool) -> None:
        self._mail.send(request.reply_to, Failed(request.id, request.attempt, reason, retryable))
