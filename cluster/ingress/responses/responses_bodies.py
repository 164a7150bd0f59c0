"""The bodies of /v1/responses, whole and as events: an answer becomes items of reasoning, text and calls."""

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from cluster.ingress.generation.body_shape import TokenEntries
from cluster.ingress.generation.choices import TextPiece
from cluster.ingress.parsers.output_events import (
    CallArguments,
    CallBegins,
    CallEnds,
    OutputEvent,
    Reasoning,
    Text,
)
from core.types import FinishReason

Json = dict[str, Any]


class ResponsesShape:
    """One response. `response` is its body so far."""

    def __init__(
        self,
        response: Json,
        *,
        new_id: Callable[[], str],
        new_call_id: Callable[[], str],
        entries: TokenEntries | None,
        namespaces: Mapping[str, tuple[str, str]],
        on_end: Callable[[Json], None],
    ) -> None:
        """`entries` are for the text's log-probabilities, where the client asked for them. `namespaces`: by the name that the
        model knows, a function's namespace and its name in it. `on_end` gets the finished body."""
        self.response = response
        self._new_id, self._new_call_id = new_id, new_call_id
        self._entries, self._on_end = entries, on_end
        self._namespaces = namespaces
        self._open: type[OutputEvent] | None = None
        """What the last item holds, while it may grow."""
        self._logprobs: list[Json] = []
        """The entries of tokens whose text has not come yet."""
        self._finish: FinishReason | None = None
        self._num_events = 0

    def frame(self, chunk: str) -> str:
        return f"{chunk}\n\n"

    def opening(self, piece: TextPiece | None = None) -> list[str]:
        return [
            self._event(f"response.{kind}", response=self.response) for kind in ("created", "in_progress")
        ]

    def chunks(self, piece: TextPiece) -> list[str]:
        self._finish = piece.finish or self._finish
        if self._entries is not None and piece.token is not None and not piece.is_reasoning:
            self._logprobs.append(self._entries.logprob(piece.token, leads=piece.leads))
        return [chunk for event in piece.events for chunk in self._of_event(event)]

    def closing(self, usage: Mapping[str, Any]) -> list[str]:
        cut = self._finish is FinishReason.LENGTH
        status = "incomplete" if cut else "completed"
        chunks = self._close(status)
        self.response["status"] = status
        self.response["incomplete_details"] = {"reason": "max_output_tokens"} if cut else None
        self.response["usage"] = {
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": {**usage["prompt_tokens_details"], "cache_write_tokens": 0},
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": usage["completion_tokens_details"],
            "total_tokens": usage["total_tokens"],
        }
        self._on_end(self.response)
        return [*chunks, self._event(f"response.{status}", response=self.response)]

    def error(self, status: int, body: Mapping[str, Any], request_id: str) -> str:
        """Return the response so far, as failed; behind its beginning, where that was not sent."""
        before = [] if self._num_events else self.opening()
        self._close("incomplete")
        code = "rate_limit_exceeded" if status == 429 else "server_error"
        self.response |= {"status": "failed", "error": {"code": code, "message": body["error"]["message"]}}
        self._on_end(self.response)
        return "\n\n".join([*before, self._event("response.failed", response=self.response)])

    def cancelled(self) -> None:
        self._close("incomplete")
        self.response["status"] = "cancelled"
        self._on_end(self.response)

    def body(self, pieces: Sequence[Sequence[TextPiece]], usage: Mapping[str, Any]) -> Json:
        (own,) = pieces
        for piece in own:
            self.chunks(piece)
        self.closing(usage)
        return self.response

    def _of_event(self, event: OutputEvent) -> list[str]:
        match event:
            case Text(text):
                begun = self._begin_part(
                    event, {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
                )
                part = self._item["content"][0]
                part["text"] += text
                logprobs, self._logprobs = self._logprobs, []
                part["logprobs"] += logprobs
                return [*begun, self._of_part("output_text.delta", delta=text, logprobs=logprobs)]
            case Reasoning(text):
                begun = self._begin_part(event, {"type": "reasoning_text", "text": ""})
                self._item["content"][0]["text"] += text
                return [*begun, self._of_part("reasoning_text.delta", delta=text)]
            case CallBegins(_, name):
                self._logprobs = []
                call_id = self._new_call_id()
                item = {"id": f"fc_{self._new_id()}", "type": "function_call", "status": "in_progress"}
                if name in self._namespaces:
                    item["namespace"], name = self._namespaces[name]
                return self._begin(event, item | {"call_id": call_id, "name": name, "arguments": ""})
            case CallArguments(_, text):
                self._item["arguments"] += text
                return [self._of_item("function_call_arguments.delta", delta=text)]
            case CallEnds(_, is_whole):
                return self._close("completed" if is_whole else "incomplete")

    @property
    def _item(self) -> Json:
        return self.response["output"][-1]

    def _begin_part(self, event: Text | Reasoning, part: Json) -> list[str]:
        """Return the events that begin a part; none where the last item goes on."""
        if self._open is type(event):
            return []
        if isinstance(event, Text):
            item: Json = {"id": f"msg_{self._new_id()}", "type": "message", "role": "assistant"}
        else:
            item = {"id": f"rs_{self._new_id()}", "type": "reasoning", "summary": []}
        begun = self._begin(event, item | {"status": "in_progress", "content": []})
        added = self._of_part("content_part.added", part=part)
        self._item["content"] = [part]
        return [*begun, added]

    def _begin(self, event: OutputEvent, item: Json) -> list[str]:
        closed = self._close("completed")
        self._open = type(event)
        self.response["output"].append(item)
        return [*closed, self._event("response.output_item.added", output_index=self._index, item=item)]

    def _close(self, status: str) -> list[str]:
        """End the last item, if there is one that has not ended."""
        if self._open is None:
            return []
        self._open, item = None, self._item
        item["status"] = status
        match item["type"]:
            case "message":
                (part,) = item["content"]
                said = {"text": part["text"], "logprobs": part["logprobs"]}
                ends = [
                    self._of_part("output_text.done", **said),
                    self._of_part("content_part.done", part=part),
                ]
            case "reasoning":
                (part,) = item["content"]
                ends = [
                    self._of_part("reasoning_text.done", text=part["text"]),
                    self._of_part("content_part.done", part=part),
                ]
            case _ if status == "completed":
                said = {"name": item["name"], "arguments": item["arguments"]}
                ends = [self._of_item("function_call_arguments.done", **said)]
            case _:
                ends = []
        return [*ends, self._event("response.output_item.done", output_index=self._index, item=item)]

    @property
    def _index(self) -> int:
        return len(self.response["output"]) - 1

    def _of_part(self, kind: str, **fields: Any) -> str:
        return self._of_item(kind, content_index=0, **fields)

    def _of_item(self, kind: str, **fields: Any) -> str:
        return self._event(f"response.{kind}", item_id=self._item["id"], output_index=self._index, **fields)

    def _event(self, kind: str, **fields: Any) -> str:
        said = json.dumps({"type": kind, "sequence_number": self._num_events, **fields})
        self._num_events += 1
        return f"event: {kind}\ndata: {said}"
