"""What an API makes of an answer: its chunks, its whole body, and the entries of single tokens."""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from cluster.ingress.delivery.generator import ChatTokenizer
from cluster.ingress.generation.choices import TextPiece
from cluster.ingress.generation.token_texts import TokenTexts
from core.types import TokenOut

Json = dict[str, Any]


class BodyShape(Protocol):
    """One response: what its chunks and its whole body look like."""

    def frame(self, chunk: str) -> str:
        """Return a chunk as an event of the stream."""
        ...

    def opening(self, piece: TextPiece) -> list[str]:
        """Return the chunks that go before a choice's first piece, which this is."""
        ...

    def chunks(self, piece: TextPiece) -> list[str]: ...
    def closing(self, usage: Mapping[str, Any]) -> list[str]:
        """Return the chunks behind the last piece."""
        ...

    def error(self, status: int, body: Mapping[str, Any], request_id: str) -> str:
        """Return the chunk of an error that ends the answer. `body` is as OpenAI's clients get it."""
        ...

    def body(self, pieces: Sequence[Sequence[TextPiece]], usage: Mapping[str, Any]) -> Json: ...


class TokenEntries:
    """Log-probabilities in the form of chats and responses."""

    def __init__(self, tokenizer: ChatTokenizer) -> None:
        self._texts = TokenTexts(tokenizer)

    def logprob(self, token: TokenOut, *, leads: bool) -> Json:
        """Return a sampled token's entry. `leads` is as in `TokenTexts`."""
        top = [self._entry(i, value, leads=leads) for i, value in token.top]
        return {**self._entry(token.token, token.logprob or 0.0, leads=leads), "top_logprobs": top}

    def _entry(self, token: int, logprob: float, *, leads: bool) -> Json:
        text, data = self._texts.text(token, leads=leads), self._texts.data(token, leads=leads)
        return {"token": text, "logprob": logprob, "bytes": None if data is None else list(data)}
