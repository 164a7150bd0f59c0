"""Turns tokens into text as they come: never half a character.

Invariant: the pieces of a sequence join to what decoding all its tokens at once would give (behind its prompt).

`tokenizers`' own stream holds back for ever what becomes no character, raises for bytes in no order, and knows no tokenizer of
another library (`tests/world/test_decode_stream.py`)."""

from collections.abc import Container, Mapping, Sequence
from types import MappingProxyType

from core.ports import TokenCodec

_UNFINISHED = "\ufffd"
_PROMPT_TOKENS = 4
_MAX_CHARACTER_TOKENS = 4
_MAX_PENDING_TOKENS = 8
"""No character needs more tokens. What is unreadable beyond that stays so."""
_WINDOW_TOKENS = 16
"""The number of tokens decoded at once. A long window is cut rarely, so that most tokens cost one call of the tokenizer."""


_NO_PLACEHOLDERS: Mapping[int, str] = MappingProxyType({})


class TextStream:
    """The text of one sequence. `hidden_tokens` have no text, and `placeholders` say what stands for some of them."""

    def __init__(
        self,
        tokenizer: TokenCodec,
        prompt: Sequence[int],
        *,
        skip_special_tokens: bool = True,
        hidden_tokens: Container[int] = (),
        placeholders: Mapping[int, str] = _NO_PLACEHOLDERS,
    ) -> None:
        self._hidden, self._placeholders = hidden_tokens, placeholders
        self._letters = _Letters(tokenizer, prompt, skip_special_tokens=skip_special_tokens)

    def push(self, token: int) -> str:
        """Return the text up to the last whole character."""
        if token in self._placeholders:
            return self._letters.finish() + self._placeholders[token]
        return "" if token in self._hidden else self._letters.push(token)

    @property
    def has_begun(self) -> bool:
        """Whether any token, of the prompt or the text, had a text of its own."""
        return self._letters.has_begun

    def anew(self) -> "TextStream":
        """Return a stream that begins where nothing stands."""
        return TextStream(
            self._letters.tokenizer, (), skip_special_tokens=self._letters.skips, hidden_tokens=self._hidden
        )

    def finish(self, stop_token: int | None = None) -> str:
        """Return what was held back, when no more tokens come. A stop token has no text of its own."""
        return self._letters.finish() + ("" if stop_token is None else self._placeholders.get(stop_token, ""))


class _Letters:
    """Makes whole characters of tokens.

    A token's text depends on its neighbours: a leading space is dropped from the first, and byte tokens of one run that is no
    UTF-8 are unreadable together. So the window of tokens that is decoded begins where a piece of text began, never inside a
    character."""

    def __init__(self, tokenizer: TokenCodec, prompt: Sequence[int], *, skip_special_tokens: bool) -> None:
        self.tokenizer, self.skips = tokenizer, skip_special_tokens
        self._ids = self._tail(prompt)
        self._shown = len(self._ids)
        """The number of tokens in the window whose text is out, and that text."""
        self._before = self._decode(self._ids)
        self._piece_start = 0
        """Where in the window the latest piece begins."""

    @property
    def has_begun(self) -> bool:
        # A space alone may have no text, two have one. Skipped tokens have none.
        return bool(self._before) or bool(self._ids and self._decode(self._ids * 2))

    def push(self, token: int) -> str:
        self._ids.append(token)
        text = self._decode(self._ids)
        if not text.endswith(_UNFINISHED):
            return self._show(text, len(self._ids))
        if len(self._ids) - self._shown < _MAX_PENDING_TOKENS:
            return ""
        return self._show(*self._readable(text))

    def finish(self) -> str:
        return self._show(self._decode(self._ids), len(self._ids))

    def _readable(self, text: str) -> tuple[str, int]:
        """Return the most of the window that leaves a possible last character whole: its text, and its number of tokens."""
        for end in range(len(self._ids) - _MAX_CHARACTER_TOKENS + 1, len(self._ids)):
            part = self._decode(self._ids[:end])
            if text.startswith(part) and len(part) > len(self._before):
                return part, end
        return text, len(self._ids)

    def _show(self, text: str, end: int) -> str:
        before = self._before
        new = text[len(before) if text.startswith(before) else _num_common(before, text) :]
        if not new and (before or end > _WINDOW_TOKENS):
            # Skipped special tokens: the window would grow without end under ignore_eos.
            del self._ids[self._shown : end]
            return ""
        self._piece_start, self._shown, self._before = self._shown, end, text
        if end > _WINDOW_TOKENS and self._piece_start > 0:
            self._forget(self._piece_start)
        return new

    def _forget(self, start: int) -> None:
        before = self._decode(self._ids[start : self._shown])
        if before:
            self._ids = self._ids[start:]
            self._shown, self._before, self._piece_start = self._shown - start, before, 0

    def _tail(self, prompt: Sequence[int]) -> list[int]:
        """Return the prompt's last tokens, from the beginning of a character on."""
        for num in range(_PROMPT_TOKENS, _PROMPT_TOKENS + _MAX_CHARACTER_TOKENS):
            tail = list(prompt[-num:])
            if not self._decode(tail).startswith(_UNFINISHED):
                return tail
        return list(prompt[-_PROMPT_TOKENS:])

    def _decode(self, ids: Sequence[int]) -> str:
        return self.tokenizer.decode(ids, skip_special_tokens=self.skips)


def _num_common(one: str, other: str) -> int:
    """Return the length of the common beginning."""
    pairs = zip(one, other, strict=False)
    return next((n for n, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))
