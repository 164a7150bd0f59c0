"""What a soak asks: every API with every feature of it, and what of an answer must be the same each time."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from baton.bench.sse import DONE, SseReader

MODEL, ADAPTER = "soak", "soak-lora"
_CHAT, _COMPLETIONS = "/v1/chat/completions", "/v1/completions"
_RESPONSES, _MESSAGES = "/v1/responses", "/v1/messages"
_TEXTS = frozenset({"content", "text", "name", "arguments", "partial_json", "thinking", "delta"})
"""Fields of a stream's events whose pieces add up to a text."""
_ENDS = frozenset({"finish_reason", "stop_reason"})
_CHANGING = frozenset(
    {
        *("id", "created", "created_at", "completed_at", "call_id", "item_id", "call_index", "signature"),
        *("prompt_tokens_details", "input_tokens_details", "cached_tokens", "previous_response_id"),
        *("cache_read_input_tokens", "cache_creation_input_tokens", "cache_creation", "input_tokens"),
    }
)
"""Names and times, and what depends on which prefixes are cached."""
_DECIMALS = 3


@dataclass(frozen=True, slots=True)
class Asked:
    """One request."""

    name: str
    path: str
    body: dict[str, Any] = field(repr=False)

    @property
    def streams(self) -> bool:
        return bool(self.body.get("stream"))


def requests() -> list[Asked]:
    """Return the requests that answers are compared of. Each is greedy, or has a seed."""
    return [_named(*one) for one in (*_chats(), *_completions(), *_others())]


def _named(name: str, path: str, body: dict[str, Any]) -> Asked:
    return Asked(name, path, {"model": MODEL, **body})


_SCHEMA = {
    "type": "object",
    "properties": {
        "shade": {"enum": ["red", "blue"]},
        "count": {"type": "integer", "minimum": 0, "maximum": 9},
    },
    "required": ["shade", "count"],
    "additionalProperties": False,
}
_TOOL = {"name": "paint", "description": "Paints a wall.", "parameters": _SCHEMA}
_STORY = "Once there was a small fox who lived at the edge of a large forest and knew every path in it. "


def _said(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def _chats() -> Iterator[tuple[str, str, dict[str, Any]]]:
    short: dict[str, Any] = {"messages": _said("Tell me about the sea."), "max_tokens": 24, "temperature": 0}
    seeded = short | {"temperature": 0.8, "seed": 7, "top_p": 0.95}
    tools: dict[str, Any] = {
        "tools": [{"type": "function", "function": _TOOL}],
        "tool_choice": "required",
        "max_tokens": 64,
    }
    form = {"type": "json_schema", "json_schema": {"name": "wall", "schema": _SCHEMA, "strict": True}}
    yield "chat", _CHAT, short
    yield "chat, streamed", _CHAT, short | {"stream": True, "stream_options": {"include_usage": True}}
    yield "chat, seed, streamed", _CHAT, seeded | {"stream": True, "max_tokens": 40}
    yield "chat, two answers", _CHAT, seeded | {"n": 2}
    yield "chat, tool call", _CHAT, short | tools
    yield "chat, tool call, streamed", _CHAT, short | tools | {"stream": True}
    yield "chat, JSON schema", _CHAT, short | {"response_format": form, "max_tokens": 64}
    yield "chat, log-probabilities", _CHAT, short | {"logprobs": True, "top_logprobs": 2}
    yield "chat, LoRA", _CHAT, short | {"model": ADAPTER}
    yield "chat, LoRA, streamed", _CHAT, short | {"model": ADAPTER, "stream": True, "max_tokens": 40}


def _completions() -> Iterator[tuple[str, str, dict[str, Any]]]:
    plain: dict[str, Any] = {"prompt": "The fox", "max_tokens": 24, "temperature": 0}
    yield "completion", _COMPLETIONS, plain
    yield "completion, streamed", _COMPLETIONS, plain | {"stream": True, "max_tokens": 60}
    yield "completion, stop strings", _COMPLETIONS, plain | {"stop": [".", "and"], "max_tokens": 60}
    yield (
        "completions of two prompts, seed",
        _COMPLETIONS,
        plain | {"prompt": ["A", "B"], "seed": 3, "temperature": 1.0},
    )
    yield (
        "completion, regular expression",
        _COMPLETIONS,
        plain | {"structured_outputs": {"regex": "(red|blue)[0-9]{3}"}},
    )
    yield (
        "completion, bias and penalties",
        _COMPLETIONS,
        plain | {"logit_bias": {"65": 4.0}, "presence_penalty": 0.5},
    )
    for count in (3, 6, 12):
        body = plain | {"prompt": _STORY * count + "Then it", "stream": True, "max_tokens": 30}
        yield f"completion, long prompt {count}", _COMPLETIONS, body
    yield "completion, long, LoRA", _COMPLETIONS, plain | {"model": ADAPTER, "prompt": _STORY * 5}


def _others() -> Iterator[tuple[str, str, dict[str, Any]]]:
    tool = {"name": "paint", "description": "Paints a wall.", "input_schema": _SCHEMA}
    message: dict[str, Any] = {"messages": _said("Tell me about trees."), "max_tokens": 24, "temperature": 0}
    called: dict[str, Any] = {"tools": [tool], "tool_choice": {"type": "any"}, "max_tokens": 64}
    response: dict[str, Any] = {"input": "Tell me about birds.", "max_output_tokens": 24, "temperature": 0}
    form = {"format": {"type": "json_schema", "name": "wall", "schema": _SCHEMA, "strict": True}}
    yield "message", _MESSAGES, message
    yield "message, streamed", _MESSAGES, message | {"stream": True, "system": "You know trees."}
    yield "message, tool call, streamed", _MESSAGES, message | called | {"stream": True}
    yield "response", _RESPONSES, response
    yield "response, streamed", _RESPONSES, response | {"stream": True, "store": False}
    yield "response, JSON schema", _RESPONSES, response | {"text": form, "max_output_tokens": 64}
    yield "tokens of a text", "/tokenize", {"prompt": _STORY}


def lasting(content: Any) -> Any:
    """Return an answer without what is another each time."""
    if isinstance(content, dict):
        return {name: lasting(value) for name, value in content.items() if name not in _CHANGING}  # pyright: ignore[reportUnknownVariableType]
    if isinstance(content, list):
        return [lasting(value) for value in content]  # pyright: ignore[reportUnknownVariableType]
    return round(content, _DECIMALS) if isinstance(content, float) else content


class Streamed:
    """Adds up the events of a stream, which may cut the same texts in other places."""

    def __init__(self) -> None:
        self._reader = SseReader()
        self.texts: dict[str, str] = {}
        self.is_over = False
        self.error = ""

    def feed(self, piece: bytes) -> None:
        for payload in self._reader.feed(piece):
            if payload == DONE:
                self.is_over = True
                continue
            event: dict[str, Any] = json.loads(payload)
            if event.get("error"):
                self.error = json.dumps(event["error"])
            kind = str(event.get("type", ""))
            self.is_over |= kind in ("message_stop", "response.completed", "response.incomplete")
            if kind.endswith((".done", ".completed", ".incomplete", ".created", ".in_progress", ".added")):
                continue  # it repeats what came in pieces
            self._add(event, (kind, str(event.get("index", event.get("output_index", "")))))

    def _add(self, value: Any, place: Sequence[str]) -> None:
        if isinstance(value, dict):
            inner: dict[str, Any] = value  # pyright: ignore[reportUnknownVariableType]
            place = (*place, str(inner.get("index", "")))
            for name, one in inner.items():
                self._add(one, (*place, name))
        elif isinstance(value, list):
            for one in value:  # pyright: ignore[reportUnknownVariableType]
                self._add(one, place)
        elif isinstance(value, str) and place[-1] in _TEXTS:
            where = "/".join(place)
            self.texts[where] = self.texts.get(where, "") + value
        elif place[-1] in _ENDS and value is not None:
            self.texts["/".join(place)] = str(value)

    @property
    def answer(self) -> dict[str, str]:
        return {place: text for place, text in self.texts.items() if text}
