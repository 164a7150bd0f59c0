"""Tokens to text, as they come: never half a character, and stop strings found across token boundaries."""

from collections.abc import Sequence

from core.ports import TokenCodec

_UNFINISHED = "\ufffd"
_CONTEXT_TOKENS = 4
_MAX_PENDING_TOKENS = 8
"""No character needs more; what is unreadable beyond that stays so."""


class TextStream:
    """The text of one sequence. `push` returns what is safe to show; `stopped` says that a stop string was found."""

    def __init__(
        self,
        tokenizer: TokenCodec,
        prompt: Sequence[int],
        stop: Sequence[str] = (),
        *,
        skip_special_tokens: bool = True,
        include_stop: bool = False,
    ) -> None:
        self._tokenizer, self._stop = tokenizer, tuple(stop)
        self._skip, self._include_stop = skip_special_tokens, include_stop
        # A few prompt tokens are decoded along, since a token's text can depend on the one before it (leading spaces).
        self._ids = list(prompt[-_CONTEXT_TOKENS:])
        self._shown = len(self._ids)
        self._held = ""
        self.stopped: str | None = None

    def push(self, token: int) -> str:
        self._ids.append(token)
        return self._check_stop(self._decode_new())

    def finish(self) -> str:
        """What was held back, when no more tokens come."""
        if self.stopped is not None:
            return ""
        before, text = self._window(self._shown), self._window(len(self._ids))
        tail, self._held = self._held, ""
        self._shown = len(self._ids)
        return self._cut(tail + text[len(before) :], final=True)

    def _window(self, end: int) -> str:
        return self._tokenizer.decode(self._ids[:end], skip_special_tokens=self._skip)

    def _decode_new(self) -> str:
        before, text = self._window(self._shown), self._window(len(self._ids))
        end = len(self._ids)
        if text.endswith(_UNFINISHED):
            if end - self._shown < _MAX_PENDING_TOKENS:
                return ""
            for cut in range(1, _CONTEXT_TOKENS):
                shorter = self._window(end - cut)
                if not shorter.endswith(_UNFINISHED):
                    text, end = shorter, end - cut
                    break
        new = text[len(before) :]
        drop = max(0, end - _CONTEXT_TOKENS)
        self._ids = self._ids[drop:]
        self._shown = end - drop
        return new

    def _check_stop(self, new: str) -> str:
        if not self._stop or not new:
            return new
        text, self._held = self._held + new, ""
        return self._cut(text, final=False)

    def _cut(self, text: str, *, final: bool) -> str:
        found = [(at, stop) for stop in self._stop if (at := text.find(stop)) >= 0]
        if found:
            at, self.stopped = min(found, key=lambda pair: (pair[0], -len(pair[1])))
            return text[: at + len(self.stopped)] if self._include_stop else text[:at]
        if final:
            return text
        keep = max((_overlap(text, stop) for stop in self._stop), default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]


def _overlap(text: str, stop: str) -> int:
    """How many of the text's last characters could be the beginning of `stop`."""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if stop.startswith(text[-n:])), 0)
