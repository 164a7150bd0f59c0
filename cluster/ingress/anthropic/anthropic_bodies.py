"""The bodies of /v1/messages, whole and as events, and its errors."""

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

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
from core.types import FinishReason

Json = dict[str, Any]
_ERRORS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


_EVENTS_PER_PING = 64


class MessagesShape:
    """One answer. `stopped` says which stop sequence has ended it, if one has."""

    def __init__(
        self,
        message_id: str,
        model: str,
        num_prompt: int,
        *,
        new_call_id: Callable[[], str],
        stopped: Callable[[], str | None],
        shows_thinking: bool,
        fills_context: bool,
    ) -> None:
        """`fills_context` says that the model's context ends before max_tokens."""
        self._head: Json = {"id": message_id, "type": "message", "role": "assistant", "model": model}
        self._num_prompt, self._new_call_id, self._stopped = num_prompt, new_call_id, stopped
        self._shows_thinking, self._fills_context = shows_thinking, fills_context
        self._num_blocks = self._num_hidden = 0
        self._open: type[OutputEvent] | None = None
        """What the last block holds, while it may grow."""
        self._called = False
        """Whether there is a whole call."""
        self._finish: FinishReason | None = None

    def frame(self, chunk: str) -> str:
        return f"{chunk}\n\n"

    def opening(self, piece: TextPiece) -> list[str]:
        usage = self._input_counts(piece.token.num_cached if piece.token else 0) | {"output_tokens": 0}
        message = {**self._head, "content": [], "stop_reason": None, "stop_sequence": None, "usage": usage}
        return [_event("message_start", message=message)]

    def chunks(self, piece: TextPiece) -> list[str]:
        self._finish = piece.finish or self._finish
        return [chunk for event in piece.events for chunk in self._of_event(event)]

    def closing(self, usage: Mapping[str, Any]) -> list[str]:
        delta = self._stop(self._finish)
        counts = self._usage(usage)
        return [*self._close(), _event("message_delta", delta=delta, usage=counts), _event("message_stop")]

    def error(self, status: int, body: Mapping[str, Any], request_id: str) -> str:
        return f"event: error\ndata: {json.dumps(messages_error(status, body, request_id))}"

    def body(self, pieces: Sequence[Sequence[TextPiece]], usage: Mapping[str, Any]) -> Json:
        (own,) = pieces
        content = list[Json]()
        arguments = ""
        for event in joined(event for piece in own for event in piece.events):
            match event:
                case Text(text):
                    content.append({"type": "text", "text": text})
                case Reasoning(text):
                    if self._shows_thinking:
                        content.append({"type": "thinking", "thinking": text, "signature": ""})
                case CallBegins(_, name):
                    arguments = ""
                    content.append({"type": "tool_use", "id": self._new_call_id(), "name": name, "input": {}})
                case CallArguments(_, text):
                    arguments += text
                case CallEnds(_, is_whole):
                    self._called |= is_whole
                    content[-1]["input"] = object_of(arguments)
        return {
            **self._head,
            "content": content,
            **self._stop(own[-1].finish),
            "usage": self._usage(usage),
        }

    def _usage(self, usage: Mapping[str, Any]) -> Json:
        thinking = usage["completion_tokens_details"]["reasoning_tokens"]
        return self._input_counts(usage["prompt_tokens_details"]["cached_tokens"]) | {
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": {"thinking_tokens": thinking},
        }

    def _input_counts(self, num_cached: int) -> Json:
        """Return the prompt's counts. Anthropic's `input_tokens` has no token in it that was cached."""
        return {
            "input_tokens": self._num_prompt - num_cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": num_cached,
        }

    def _of_event(self, event: OutputEvent) -> list[str]:
        match event:
            case Text(text):
                return self._grow(event, {"type": "text", "text": ""}, {"type": "text_delta", "text": text})
            case Reasoning(text):
                if not self._shows_thinking:
                    return self._ping()
                block = {"type": "thinking", "thinking": "", "signature": ""}
                return self._grow(event, block, {"type": "thinking_delta", "thinking": text})
            case CallBegins(_, name):
                block = {"type": "tool_use", "id": self._new_call_id(), "name": name, "input": {}}
                return [*self._close(), self._begin(event, block)]
            case CallArguments(_, text):
                return [self._delta({"type": "input_json_delta", "partial_json": text})]
            case CallEnds(_, is_whole):
                self._called |= is_whole
                return self._close()

    def _ping(self) -> list[str]:
        """Return now and then an event that says nothing: clients give up on a stream that is silent while a model thinks."""
        self._num_hidden += 1
        return [_event("ping")] if self._num_hidden % _EVENTS_PER_PING == 0 else []

    def _grow(self, event: OutputEvent, block: Json, delta: Json) -> list[str]:
        begun = [] if self._open is type(event) else [*self._close(), self._begin(event, block)]
        return [*begun, self._delta(delta)]

    def _begin(self, event: OutputEvent, block: Json) -> str:
        self._open = type(event)
        self._num_blocks += 1
        return _event("content_block_start", index=self._num_blocks - 1, content_block=block)

    def _delta(self, delta: Json) -> str:
        return _event("content_block_delta", index=self._num_blocks - 1, delta=delta)

    def _close(self) -> list[str]:
        if self._open is None:
            return []
        signature = (
            [self._delta({"type": "signature_delta", "signature": ""})] if self._open is Reasoning else []
        )
        self._open = None
        return [*signature, _event("content_block_stop", index=self._num_blocks - 1)]

    def _stop(self, finish: FinishReason | None) -> Json:
        """Return why the answer has ended. Clients run its calls only where they are the reason."""
        stopped = self._stopped()
        if finish is FinishReason.LENGTH:
            reason, stopped = "model_context_window_exceeded" if self._fills_context else "max_tokens", None
        elif self._called:
            reason, stopped = "tool_use", None
        else:
            reason = "end_turn" if stopped is None else "stop_sequence"
        return {"stop_reason": reason, "stop_sequence": stopped}


def messages_error(status: int, body: Mapping[str, Any], request_id: str) -> Json:
    """Return an error's body. `body` is the same error as OpenAI's clients get it."""
    kind = _ERRORS.get(status, "api_error" if status >= 500 else "invalid_request_error")
    error: Json = {"type": kind, "message": body["error"]["message"]}
    if code := body["error"]["code"]:
        error["details"] = {"error_code": code}
    return {"type": "error", "error": error, "request_id": request_id}


def _event(kind: str, **fields: Any) -> str:
    return f"event: {kind}\ndata: {json.dumps({'type': kind, **fields})}"
