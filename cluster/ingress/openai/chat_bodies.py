"""The bodies of /v1/chat/completions, whole and in chunks."""

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from cluster.ingress.generation.body_shape import Json, TokenEntries
from cluster.ingress.generation.choices import TextPiece
from cluster.ingress.openai.openai_bodies import OpenAIShape
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


class ChatShape(OpenAIShape):
    id_prefix = "chatcmpl"
    chunk_object = "chat.completion.chunk"
    object = "chat.completion"

    def __init__(self, *args: Any, new_call_id: Callable[[int], str]) -> None:
        super().__init__(*args)
        self._new_call_id, self._entries = new_call_id, TokenEntries(self._tokenizer)
        self._called: set[int] = set()
        """The choices that have a whole call."""

    def opening(self, piece: TextPiece) -> list[str]:
        delta = '{"role": "assistant", "content": ""}'
        choice = f'{{"index": {piece.index}, "delta": {delta}, "logprobs": null, "finish_reason": null}}'
        ids = f', "prompt_token_ids": {self._prompt_ids(0)}' if self._extras.token_ids else ""
        return [self._chunk(choice, ids)]

    def chunks(self, piece: TextPiece) -> list[str]:
        self._num_output += 1
        extras = self._extras
        if not piece.events and piece.finish is None and not extras.logprobs and not extras.token_ids:
            return []
        deltas = [delta for event in piece.events if (delta := self._delta(piece.index, event))]
        if not deltas or (piece.finish is not None and not isinstance(piece.events[-1], Text)):
            deltas.append("{}" if piece.finish is not None else '{"content": ""}')
        logprobs, finish, ids = "null", "null", self._token_ids(piece)
        if extras.logprobs and piece.token is not None:
            logprobs = json.dumps(
                {"content": [self._entries.logprob(piece.token, leads=piece.leads)], "refusal": None}
            )
        chunks: list[str] = []
        for number, delta in enumerate(deltas, 1):
            if number == len(deltas) and piece.finish is not None:
                finish = f'"{self._finish_reason(piece)}"'
            choice = f'{{"index": {piece.index}, "delta": {delta}, "logprobs": {logprobs}, "finish_reason": {finish}{ids}}}'
            chunks.append(self._chunk(choice))
            logprobs, ids = "null", ""
        return chunks

    def _delta(self, choice: int, event: OutputEvent) -> str:
        """Return a chunk's delta for one event; empty where no chunk says it."""
        match event:
            case Text(text):
                return f'{{"content": {json.dumps(text)}}}'
            case Reasoning(text):
                said = json.dumps(text)
                return f'{{"reasoning_content": {said}, "reasoning": {said}}}'
            case CallBegins(index, name):
                function = {"name": name, "arguments": ""}
                call = {
                    "index": index,
                    "id": self._new_call_id(choice),
                    "type": "function",
                    "function": function,
                }
                return json.dumps({"tool_calls": [call]})
            case CallArguments(index, text):
                return f'{{"tool_calls": [{{"index": {index}, "function": {{"arguments": {json.dumps(text)}}}}}]}}'
            case CallEnds(_, is_whole):
                self._note_call(choice, is_whole=is_whole)
                return ""

    def _note_call(self, choice: int, *, is_whole: bool) -> None:
        if is_whole:
            self._called.add(choice)

    def _finish_reason(self, piece: TextPiece) -> str | None:
        if piece.finish is FinishReason.STOP and piece.index in self._called:
            return "tool_calls"
        return piece.finish and piece.finish.value

    def body(self, pieces: Sequence[Sequence[TextPiece]], usage: Mapping[str, Any]) -> Json:
        whole, first = super().body(pieces, usage), pieces[0][0].token
        if self._extras.token_ids:
            whole["prompt_token_ids"] = self._prompt_ids(0)
        if self._extras.prompt_logprobs is not None and first is not None:
            whole["prompt_logprobs"] = self._prompt_logprobs(0, first.prompt_scores)
        return whole

    def _choice(self, index: int, pieces: Sequence[TextPiece]) -> Json:
        logprobs = None
        if self._extras.logprobs:
            logprobs = {
                "content": [
                    self._entries.logprob(p.token, leads=p.leads) for p in pieces if p.token is not None
                ],
                "refusal": None,
            }
        message = self._message(index, joined(event for piece in pieces for event in piece.events))
        finish = self._finish_reason(pieces[-1])
        choice: Json = {"index": index, "message": message, "logprobs": logprobs, "finish_reason": finish}
        if self._extras.token_ids:
            choice["token_ids"] = [piece.token.token for piece in pieces if piece.token is not None]
        return choice

    def _message(self, choice: int, events: Sequence[OutputEvent]) -> Json:
        text = "".join(event.text for event in events if isinstance(event, Text))
        reasoning = "".join(event.text for event in events if isinstance(event, Reasoning))
        calls: list[Json] = []
        for event in events:
            match event:
                case CallBegins(_, name):
                    function = {"name": name, "arguments": ""}
                    calls.append({"id": self._new_call_id(choice), "type": "function", "function": function})
                case CallArguments(_, text_of_call):
                    calls[-1]["function"]["arguments"] += text_of_call
                case CallEnds(_, is_whole):
                    self._note_call(choice, is_whole=is_whole)
                case _:
                    pass
        content = text if text or not (calls or reasoning) else None
        message: Json = {"role": "assistant", "content": content, "refusal": None}
        if reasoning:
            message |= {"reasoning_content": reasoning, "reasoning": reasoning}
        if calls:
            message["tool_calls"] = calls
        return message
