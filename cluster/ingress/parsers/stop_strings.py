"""Stop strings: a text that comes in pieces ends where the first of them is found."""

from collections.abc import Mapping, Sequence

_FIRST_PLACEHOLDER = 0xFDD0
_NUM_PLACEHOLDERS = 32
"""Unicode's noncharacters from U+FDD0 on, which no text has."""


class StopStrings:
    """The stop strings of one sequence. `found` is the one that has ended its text.

    A stop string may have special tokens in it, which have no text. Each such token is written as its placeholder, a single
    character that stop strings match and that no client sees."""

    def __init__(
        self,
        stops: Sequence[str] = (),
        *,
        hidden: Mapping[str, int] | None = None,
        include: bool = False,
        min_tokens: int = 0,
    ) -> None:
        """`hidden` are the tokens that have no text, by name. With `include` the text ends after the stop string. Stop strings
        count only in text that begins after `min_tokens` tokens."""
        self.found: str | None = None
        self._include, self._tokens_before = include, min_tokens
        self._is_armed = min_tokens == 0
        tokens = hidden if hidden and stops else {}
        named = [name for name in tokens if name and any(name in stop for stop in stops)]
        written = {name: chr(_FIRST_PLACEHOLDER + i) for i, name in enumerate(named[:_NUM_PLACEHOLDERS])}
        self.placeholders: Mapping[int, str] = {tokens[name]: text for name, text in written.items()}
        """By token, what stands for it in the text."""
        self._hide = {ord(character): None for character in written.values()}
        self._forms = {stop: stop for stop in stops}
        for stop in stops:
            self._forms.setdefault(_with_placeholders(stop, written), stop)
        self._held = ""

    def begin_token(self) -> None:
        """The text of one more token follows."""
        self._is_armed = self._tokens_before <= 0
        self._tokens_before -= 1

    def push(self, text: str) -> str:
        """Return what of the text can be shown. What may be the beginning of a stop string is held back."""
        if self.found is not None:
            return ""
        if not self._forms or not self._is_armed:
            return self.shown(text)
        text, self._held = self._held + text, ""
        places = ((at, -len(form), form) for form in self._forms if (at := text.find(form)) >= 0)
        if first := min(places, default=None):
            at, _, form = first
            self.found = self._forms[form]
            return self.shown(text[:at]) + (self.found if self._include else "")
        keep = max(_overlap(text, form) for form in self._forms)
        self._held = text[len(text) - keep :]
        return self.shown(text[: len(text) - keep])

    def flush(self) -> str:
        """Return what was held back, where the text ends or something else follows."""
        held, self._held = self._held, ""
        return self.shown(held)

    def shown(self, text: str) -> str:
        """Return the text without placeholders."""
        return text.translate(self._hide) if self._hide else text


def _with_placeholders(stop: str, written: Mapping[str, str]) -> str:
    for name in sorted(written, key=len, reverse=True):
        stop = stop.replace(name, written[name])
    return stop


def _overlap(text: str, stop: str) -> int:
    """Return how many of the text's last characters could be the beginning of `stop`."""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if stop.startswith(text[-n:])), 0)
