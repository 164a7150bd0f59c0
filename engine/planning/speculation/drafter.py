"""The seam to whoever proposes what sequences sample next. A draft token may be wrong: it costs time then, and changes no
token."""

from collections.abc import Sequence as SeqOf
from dataclasses import dataclass
from typing import Protocol

from core.types import TokenId
from engine.planning.sequence import Sequence


@dataclass(frozen=True, slots=True)
class Draft:
    tokens: tuple[TokenId, ...]
    source: str
    """The kind of text it is from. How often draft tokens are right is learned for each source."""
    match: int
    """The number of the sequence's last tokens that it has followed before."""


class Drafter(Protocol):
    def draft(self, seqs: SeqOf[Sequence], most: int) -> list[Draft | None]:
        """Return for each of `seqs`, of which all tokens are known, at most `most` tokens, or None without anything to go by."""
        ...

    def verified(self, seq: Sequence, proposed: int, right: int) -> None:
        """Learn that the first `right` of `proposed` tokens, which a step has computed, were right. None, if nobody has proposed
        what was asked for."""
        ...

    def left(self, seq: Sequence) -> None:
        """Forget a sequence that is not here any more."""
        ...


def following(text: SeqOf[TokenId], end: int, most: int) -> tuple[TokenId, ...]:
    """Return `most` tokens of `text` from `end` on. What has repeated itself up to the text's end is taken to go on so."""
    found = text[end : end + most]
    period = len(text) - end
    return tuple(found[at % period] for at in range(most)) if period < most else tuple(found)
