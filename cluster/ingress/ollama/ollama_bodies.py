"""What Ollama's clients get: lines of JSON, of which the last says how the answer ended, or one body; and errors."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Protocol

from cluster.ingress.generation.body_shape import Json, TokenEntries
from cluster.ingress.generation.choices import TextPiece
from cluster.ingress.http.request_json import object_of
from cluster.ingress.parsers.output_events import (
    CallArguments,
    CallBegins,
    CallEnds,
    OutputEvent,
    Reasoning,
    Text,
    joined,
)
from core.clock import current_time
from core.types import FinishReason


class Wording(Protocol):
    """How a route says what the model said."""

    def __call__(self, content: str, thinking: str = "", calls: Sequence[Json] = ()) -> Json: ...


def message_wording(content: str, thinking: str = "", calls: Sequence[Json] = ()) -> Json:
    """Return it as /api/chat has it."""
    message: Json = {"role": "assistant", "content": content}
    if thinking:
        message["thinking"] = thinking
    if calls:
        message["tool_calls"] = calls
    return {"message": message}


def response_wording(content: str, thinking: str = "", calls: Sequence[Json] = ()) -> Json:
    """Return it as /api/generate has it, where no tool is called."""
    return {"response": content, **({"thinking": thinking} if thinking else {})}


@dataclass(frozen=True, slots=True)
class AskedTimes:
    """When a request came, and when its prompt was given to the cluster."""

    arrival_at: float
    asked_at: float

    def whole(self) -> Json:
        """Return what is known of a request that is over, in nanoseconds."""
        return {
            "total_duration": _ns(current_time() - self.arrival_at),
            "load_duration": _ns(self.asked_at - self.arrival_at),
        }

    def of_tokens(self, first_at: float, last_at: float) -> Json:
        return {
            "prompt_eval_duration": _ns(first_at - self.asked_at),
            "eval_duration": _ns(last_at - first_at),
        }


class OllamaShape:
    """One answer."""

    def __init__(
        self,
        model: str,
        wording: Wording,
        times: AskedTimes,
        *,
        new_call_id: Callable[[], str],
        entries: TokenEntries | None,
        context: Sequence[int] | None,
    ) -> None:
        """`entries`: the answer has log-probabilities. `context`: the prompt, where the answer ends with all its tokens."""
        self._model, self._wording, self._times = model, wording, times
        self._new_call_id, self._entries = new_call_id, entries
        self._context = None if context is None else [*context]
        self._name = self._arguments = ""
        """The call that may grow."""
        self._finish: FinishReason | None = None
        self._first_at = self._last_at = 0.0

    def frame(self, chunk: str) -> str:
        return f"{chunk}\n"

    def opening(self, piece: TextPiece) -> list[str]:
        return []

    def chunks(self, piece: TextPiece) -> list[str]:
        self._note(piece)
        content, thinking, calls = self._said(piece.events)
        logprobs = self._logprobs([piece])
        if not (content or thinking or calls or logprobs):
            return []
        said = self._wording(content, thinking, calls)
        return [json.dumps({**self._head(), **said, "done": False, **logprobs})]

    def closing(self, usage: Mapping[str, Any]) -> list[str]:
        return [json.dumps({**self._head(), **self._wording(""), **self._end(usage)})]

    def error(self, status: int, body: Mapping[str, Any], request_id: str) -> str:
        return json.dumps(ollama_error(status, body, request_id))

    def body(self, pieces: Sequence[Sequence[TextPiece]], usage: Mapping[str, Any]) -> Json:
        (own,) = pieces
        for piece in own:
            self._note(piece)
        said = self._wording(*self._said(joined(event for piece in own for event in piece.events)))
        return {**self._head(), **said, **self._end(usage), **self._logprobs(own)}

    def _note(self, piece: TextPiece) -> None:
        self._finish = piece.finish or self._finish
        if piece.token is None:
            return
        self._first_at = self._first_at or piece.at
        self._last_at = piece.at
        if self._context is not None:
            self._context.append(piece.token.token)

    def _said(self, events: Sequence[OutputEvent]) -> tuple[str, str, list[Json]]:
        """Return (text, reasoning, calls). A call is shown when it is whole; one that broke off is text, so that nobody runs
        it."""
        content = thinking = ""
        calls: list[Json] = []
        for event in events:
            match event:
                case Text(text):
                    content += text
                case Reasoning(text):
                    thinking += text
                case CallBegins(_, name):
                    self._name, self._arguments = name, ""
                case CallArguments(_, text):
                    self._arguments += text
                case CallEnds(index, True):
                    function = {
                        "index": index,
                        "name": self._name,
                        "arguments": object_of(self._arguments),
                    }
                    calls.append({"id": self._new_call_id(), "function": function})
                case CallEnds():
                    content += f"{self._name} {self._arguments}"
        return content, thinking, calls

    def _logprobs(self, pieces: Sequence[TextPiece]) -> Json:
        if self._entries is None:
            return {}
        found = [self._entries.logprob(p.token, leads=p.leads) for p in pieces if p.token is not None]
        return {"logprobs": found} if found else {}

    def _head(self) -> Json:
        return head_of(self._model)

    def _end(self, usage: Mapping[str, Any]) -> Json:
        end: Json = {
            "done": True,
            "done_reason": "length" if self._finish is FinishReason.LENGTH else "stop",
            **self._times.whole(),
            **self._times.of_tokens(self._first_at, self._last_at),
            "prompt_eval_count": usage["prompt_tokens"],
            "eval_count": usage["completion_tokens"],
        }
        return end if self._context is None else end | {"context": self._context}


def head_of(model: str) -> Json:
    return {"model": model, "created_at": said_at(datetime.now(UTC))}


def said_at(instant: datetime) -> str:
    return instant.isoformat().replace("+00:00", "Z")


def ollama_error(status: int, body: Mapping[str, Any], request_id: str) -> Json:
    """Return an error's body. `body` is the same error as OpenAI's clients get it."""
    return {"error": body["error"]["message"]}


def _ns(seconds: float) -> int:
    return max(0, round(seconds * 1e9))
