"""The bodies that clients get, whole and in chunks: what OpenAI's routes share, and those of /v1/completions.

A chunk's JSON is put together around a prepared frame: only its text goes through the JSON encoder, once per token."""

import json
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from cluster.ingress.api.choices import TextPiece
from cluster.ingress.api.generator import ChatTokenizer
from core.types import TokenOut

Json = dict[str, Any]


class BodyShape(Protocol):
    """One response: what its chunks and its whole body look like."""

    def frame(self, chunk: str) -> str:
        """A chunk as a server-sent event."""
        ...

    def opening(self, index: int) -> list[str]:
        """Chunks that go before a choice's first piece."""
        ...

    def chunks(self, piece: TextPiece) -> list[str]: ...
    def closing(self, usage: Mapping[str, Any]) -> list[str]:
        """Chunks behind the last piece."""
        ...

    def error(self, status: int, body: Mapping[str, Any], request_id: str) -> str:
        """The chunk of an error that ends the answer. `body`: as OpenAI's clients get it."""
        ...

    def body(self, pieces: Sequence[Sequence[TextPiece]], usage: Mapping[str, Any]) -> Json: ...


class TokenEntries:
    """Log-probabilities in the form of chats and responses."""

    def __init__(self, tokenizer: ChatTokenizer) -> None:
        self._tokenizer = tokenizer

    def logprob(self, token: TokenOut) -> Json:
        top = [self._entry(i, value) for i, value in token.top]
        return {**self._entry(token.token, token.logprob or 0.0), "top_logprobs": top}

    def _entry(self, token: int, logprob: float) -> Json:
        text = self._tokenizer.decode([token], skip_special_tokens=False)
        # Part of a character has no text of its own, so its bytes are not known here.
        return {"token": text, "logprob": logprob, "bytes": None if "\ufffd" in text else list(text.encode())}


class OpenAIShape:
    chunk_object: str
    object: str

    def __init__(
        self,
        response_id: str,
        created: int,
        model: str,
        tokenizer: ChatTokenizer,
        with_logprobs: bool,
        usage: bool,
    ) -> None:
        self._head: Json = {"id": response_id, "created": created, "model": model, "system_fingerprint": None}
        self._tokenizer, self._with_logprobs = tokenizer, with_logprobs
        start = json.dumps({**self._head, "object": self.chunk_object})[:-1]
        self._frame = start + ', "choices": ['
        self._tail = '], "usage": null}' if usage else "]}"
        self._with_usage = usage

    def frame(self, chunk: str) -> str:
        return f"data: {chunk}\n\n"

    def closing(self, usage: Mapping[str, Any]) -> list[str]:
        if not self._with_usage:
            return ["[DONE]"]
        chunk = {**self._head, "object": self.chunk_object, "choices": [], "usage": usage}
        return [json.dumps(chunk), "[DONE]"]

    def error(self, status: int, body: Mapping[str, Any], request_id: str) -> str:
        return json.dumps(body)

    def body(self, pieces: Sequence[Sequence[TextPiece]], usage: Mapping[str, Any]) -> Json:
        choices = [self._choice(index, own) for index, own in enumerate(pieces)]
        return {**self._head, "object": self.object, "choices": choices, "usage": usage}

    def _choice(self, index: int, pieces: Sequence[TextPiece]) -> Json:
        raise AssertionError

    def _token_text(self, token: int) -> str:
        return self._tokenizer.decode([token], skip_special_tokens=False)


def finish_word(piece: TextPiece) -> str:
    return "null" if piece.finish is None else f'"{piece.finish.value}"'


class CompletionShape(OpenAIShape):
    chunk_object = "text_completion"
    object = "text_completion"

    def __init__(self, *args: Any, echoes: Mapping[int, str]) -> None:
        super().__init__(*args)
        self._echoes = echoes
        self._offsets: dict[int, int] = {index: len(text) for index, text in echoes.items()}

    def opening(self, index: int) -> list[str]:
        echo = self._echoes.get(index)
        if not echo:
            return []
        choice = f'{{"index": {index}, "text": {json.dumps(echo)}, "logprobs": null, "finish_reason": null}}'
        return [self._frame + choice + self._tail]

    def chunks(self, piece: TextPiece) -> list[str]:
        if not piece.text and piece.finish is None and not self._with_logprobs:
            return []
        logprobs = json.dumps(self._logprobs(piece.index, [piece])) if self._with_logprobs else "null"
        choice = (
            f'{{"index": {piece.index}, "text": {json.dumps(piece.text)}, '
            f'"logprobs": {logprobs}, "finish_reason": {finish_word(piece)}}}'
        )
        return [self._frame + choice + self._tail]

    def _choice(self, index: int, pieces: Sequence[TextPiece]) -> Json:
        text = self._echoes.get(index, "") + "".join(p.text for p in pieces)
        logprobs = self._logprobs(index, pieces) if self._with_logprobs else None
        finish = pieces[-1].finish
        return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": finish and finish.value}

    def _logprobs(self, index: int, pieces: Sequence[TextPiece]) -> Json:
        out: Json = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        offset = self._offsets.get(index, 0)
        for piece in pieces:
            if piece.token is None:
                continue
            out["tokens"].append(self._token_text(piece.token.token))
            out["token_logprobs"].append(piece.token.logprob)
            out["top_logprobs"].append(self._top(piece.token))
            out["text_offset"].append(offset)
            offset += len(piece.text)
        self._offsets[index] = offset
        return out

    def _top(self, token: TokenOut) -> dict[str, float | None]:
        """The drawn token is always among them, so there may be one more than the client asked for."""
        likeliest = {self._token_text(i): value for i, value in token.top}
        return {**likeliest, self._token_text(token.token): token.logprob}
