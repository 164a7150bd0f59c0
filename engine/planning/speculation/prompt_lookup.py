"""Drafts by prompt lookup: what followed the sequence's last few tokens when it had them before, prompt and output alike.

Saxena, "Prompt Lookup Decoding" (2023)."""

from collections.abc import Sequence as SeqOf

from core.types import TokenId
from engine.planning.sequence import Sequence
from engine.planning.speculation.drafter import Draft, following

_SIZES = (4, 2)
"""Tokens that are looked up, the longest first."""
_MOST_TOKENS = 16_384
"""Places of a sequence that are remembered: its last ones, up to twice as many."""
_CATCH_UP = 2_048
"""Tokens that are read before one step, so that long prompts do not hold it up."""
_LONGEST_MATCH = 16


class PromptLookup:
    """A `Drafter`."""

    def __init__(self) -> None:
        self._places: dict[str, _Places] = {}

    def draft(self, seqs: SeqOf[Sequence], most: int) -> list[Draft | None]:
        allowance = _CATCH_UP
        out: list[Draft | None] = []
        for seq in seqs:
            places = self._places.get(seq.key)
            if places is None or places.num_read > 2 * _MOST_TOKENS:
                places = self._places[seq.key] = _Places(max(0, len(seq.tokens) - _MOST_TOKENS))
            allowance -= places.read(seq.tokens, allowance)
            out.append(places.find(seq.tokens, most))
        return out

    def verified(self, seq: Sequence, proposed: int, right: int) -> None:
        """Do nothing: the tokens tell."""

    def left(self, seq: Sequence) -> None:
        self._places.pop(seq.key, None)


class _Places:
    """The places where each few tokens of one sequence ended last, but for its very end."""

    def __init__(self, start: int) -> None:
        self._start = self._end = start
        self._last: tuple[dict[tuple[TokenId, ...], int], ...] = tuple({} for _ in _SIZES)

    @property
    def num_read(self) -> int:
        return self._end - self._start

    def read(self, tokens: SeqOf[TokenId], most: int) -> int:
        """Read at most `most` tokens. Returns how many were read."""
        stop = min(len(tokens) - 1, self._end + most)
        count = max(0, stop - self._end)
        for end in range(self._end + 1, stop + 1):
            for size, last in zip(_SIZES, self._last, strict=True):
                if end - self._start >= size:
                    last[tuple(tokens[end - size : end])] = end
        self._end += count
        return count

    def find(self, tokens: SeqOf[TokenId], most: int) -> Draft | None:
        if self._end < len(tokens) - 1:
            return None
        for size, last in zip(_SIZES, self._last, strict=True):
            if (end := last.get(tuple(tokens[-size:]))) is not None:
                return Draft(following(tokens, end, most), "ngram", _match(tokens, end, size))
        return None


def _match(tokens: SeqOf[TokenId], end: int, size: int) -> int:
    """Return how many tokens before `end` equal the last ones. `size` of them do."""
    longest = min(end, _LONGEST_MATCH)
    while size < longest and tokens[end - size - 1] == tokens[-size - 1]:
        size += 1
    return size
