"""Reads JSON as models write it, and writes it as it should be, while it comes.

What is valid stays as it stands, character by character. Mended are: line breaks and quotes within strings, escapes that JSON
does not have, Python's quotes and words, names without quotes, commas too many, and brackets that were not closed."""

import json
import re
from collections.abc import Callable, Sequence

Sink = Callable[[str], None]

_CONTROLS = "".join(map(chr, range(0x20)))
_BREAKS = {quote: frozenset(f'{quote}"\\{_CONTROLS}') for quote in "\"'"}
_PLAIN_ESCAPES = '"\\/bfnrt'
_HEX = frozenset("0123456789abcdefABCDEF")
_CODE_LENGTH = 6
"""The length of `\\u0041`."""
_CLOSERS = {"{": "}", "[": "]"}
_OPENERS = {"}": "{", "]": "["}
_END_OF_WORD = frozenset(",:{}[]\"'<")
_NUMBER = re.compile(r"-?(0|[1-9]\d*)(\.\d+)?([eE][+-]?\d+)?")
_WORDS = {"true": "true", "false": "false", "null": "null", "True": "true", "False": "false", "None": "null"}


class Malformed(Exception):
    """The text is no value, or no call, of the expected form."""


class JsonText:
    """One value. `push` takes one character at a time, or a run of characters that are not in `breaks`."""

    def __init__(self, sink: Sink, marks: Sequence[str] = ()) -> None:
        """`marks`: a string with one of them in it is not mended. It never ended, and what stands in it is another call."""
        self._sink, self._marks = sink, marks
        self._open: list[str] = []
        self._wants = "value"
        """`value`, `key`, `colon`, or `comma` after a value."""
        self._word = self._quote = self._escape = self._comma = ""
        self._behind_quote: str | None = None
        """The white space behind a quote that may end the string."""
        self._tail, self._has_mark = "", False
        self.is_done = False
        self.rest = ""
        """The character behind the value, where that had to be read."""

    @property
    def breaks(self) -> frozenset[str] | None:
        plain = self._quote and not self._escape and self._behind_quote is None
        return _BREAKS[self._quote] if plain else None

    def push(self, run: str) -> None:
        """Read on. Raises Malformed for what cannot be mended."""
        if self._behind_quote is not None:
            self._after_quote(run)
        elif self._escape:
            self._in_escape(run)
        elif self._quote:
            self._in_string(run)
        elif self._word and not (run.isspace() or run in _END_OF_WORD):
            self._word += run
        else:
            self._end_word()
            self._between(run)

    def feed(self, text: str) -> str:
        """Read a text as far as the value goes, and return the rest of it. Raises Malformed."""
        at = 0
        while at < len(text) and not self.is_done:
            end, breaks = at + 1, self.breaks
            while (
                breaks is not None and text[at] not in breaks and end < len(text) and text[end] not in breaks
            ):
                end += 1
            self.push(text[at:end])
            at = end
        return self.rest + text[at:]

    def close(self) -> bool:
        """Close what is open, since no more comes. Returns False where a value or the end of a string is missing."""
        if self._behind_quote is not None:
            self._end_string()
        if self._quote or self.is_done:
            return self.is_done
        self._end_word()
        if self.is_done:
            return True
        if not self._open or self._wants == "colon" or (self._wants == "value" and self._open[-1] == "{"):
            return False
        self._drop_comma()
        while self._open:
            self._sink(_CLOSERS[self._open.pop()])
        self.is_done = True
        return True

    def cut(self) -> None:
        """Write what was held back, as it stands: the text was cut here."""
        held = self._comma + self._word + self._escape
        self._sink(held if self._behind_quote is None else '"' + self._behind_quote)

    def _between(self, character: str) -> None:
        """Read a character that is in no string and no word."""
        if self.is_done:
            self.rest = character
        elif character.isspace():
            self._space(character)
        elif character in _OPENERS:
            self._close(character)
        elif character == ",":
            self._separate()
        elif character == ":" and self._wants == "colon":
            self._sink(character)
            self._wants = "value"
        elif character == "<" and self.close():
            self.rest = character
        elif self._wants not in ("value", "key") or character in ":<":
            raise Malformed
        else:
            self._begin(character)

    def _begin(self, character: str) -> None:
        self._release_comma()
        if character in _BREAKS:
            self._quote, self._tail, self._has_mark = character, "", False
            self._sink('"')
        elif character not in _CLOSERS:
            self._word = character
        elif self._wants == "key":
            raise Malformed
        else:
            self._open.append(character)
            self._sink(character)
            self._wants = "key" if character == "{" else "value"

    def _space(self, character: str) -> None:
        if self._comma:
            self._comma += character
        elif self._open:
            self._sink(character)

    def _separate(self) -> None:
        if self._wants == "value" and self._open and self._open[-1] == "{":
            self._sink("null")
            self._wants = "comma"
        if self._wants == "comma":
            self._comma, self._wants = ",", "key" if self._open[-1] == "{" else "value"
        elif self._wants == "colon" or not self._open:
            raise Malformed

    def _close(self, closer: str) -> None:
        opener = _OPENERS[closer]
        if opener not in self._open or self._wants == "colon":
            raise Malformed
        if self._wants == "value" and self._open[-1] == "{":
            self._sink("null")
        self._drop_comma()
        while (inner := self._open.pop()) != opener:
            self._sink(_CLOSERS[inner])
        self._sink(closer)
        self._end_value()

    def _end_value(self) -> None:
        self._wants = "comma"
        self.is_done = not self._open

    def _release_comma(self) -> None:
        self._sink(self._comma)
        self._comma = ""

    def _drop_comma(self) -> None:
        self._sink(self._comma[1:])
        self._comma = ""

    def _end_word(self) -> None:
        word, self._word = self._word, ""
        if not word:
            return
        if self._wants == "key":
            self._sink(json.dumps(word, ensure_ascii=False))
            self._wants = "colon"
            return
        is_number = _NUMBER.fullmatch(word)
        self._sink(word if is_number else _WORDS.get(word) or json.dumps(word, ensure_ascii=False))
        self._end_value()

    def _in_string(self, run: str) -> None:
        if self._marks and not self._has_mark:
            self._tail += run
            self._has_mark = any(mark in self._tail for mark in self._marks)
            self._tail = self._tail[-max(map(len, self._marks)) :]
        if run == self._quote:
            self._behind_quote = ""
        elif run == "\\":
            self._escape = run
        else:
            self._sink(_escaped(run) if run[0] in _BREAKS["'"] else run)

    def _in_escape(self, character: str) -> None:
        begun = self._escape
        if begun != "\\":
            self._in_code(character)
        elif character == "u":
            self._escape += character
        else:
            self._escape = ""
            if character in _PLAIN_ESCAPES:
                self._sink(begun + character)
            else:
                self._sink("'" if character == "'" else _escaped(begun + character))

    def _in_code(self, character: str) -> None:
        if character not in _HEX:
            begun, self._escape = self._escape, ""
            self._sink(_escaped(begun))
            self._in_string(character)
            return
        self._escape += character
        if len(self._escape) == _CODE_LENGTH:
            self._sink(self._escape)
            self._escape = ""

    def _after_quote(self, character: str) -> None:
        """Tell a quote that ends a string from one within it."""
        assert self._behind_quote is not None
        if character.isspace():
            self._behind_quote += character
        elif character in (":" if self._wants == "key" else ",}]<" if self._open else ",}]<`"):
            self._end_string()
            self._between(character)
        elif self._has_mark:
            raise Malformed
        else:
            within, self._behind_quote = self._quote + self._behind_quote, None
            self._sink(_escaped(within))
            self._in_string(character)

    def _end_string(self) -> None:
        space, self._behind_quote, self._quote = self._behind_quote or "", None, ""
        self._sink('"' + (space if self._open else ""))
        if self._wants == "key":
            self._wants = "colon"
        else:
            self._end_value()


def _escaped(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]
