"""Drafts by a model or a head on the rank: the planner says of which sequences it is to propose tokens, and how many at most.

What the rank proposes is not known here. So a draft token is as good as the sequence's last ones were."""

from collections.abc import Sequence as SeqOf

from core.plan import PROPOSED
from engine.planning.sequence import Sequence
from engine.planning.speculation.drafter import Draft

_MATCH = 5
"""What nothing known of a sequence counts as. One right draft token after another counts as a longer match."""
_LONGEST = 32


class Proposals:
    """A `Drafter`."""

    def __init__(self) -> None:
        self._followed: dict[str, int] = {}
        """For sequences that the draft model has all tokens of, how many it has proposed right in a row."""

    def draft(self, seqs: SeqOf[Sequence], most: int) -> list[Draft | None]:
        return [self._draft(seq.key, most) for seq in seqs]

    def verified(self, seq: Sequence, proposed: int, right: int) -> None:
        if not proposed:
            self._followed.pop(seq.key, None)
            return
        before = self._followed.get(seq.key, 0) if right == proposed else 0
        self._followed[seq.key] = min(_LONGEST, before + right)

    def left(self, seq: Sequence) -> None:
        self._followed.pop(seq.key, None)

    def _draft(self, key: str, most: int) -> Draft:
        """Return one draft token of a sequence that the draft model may have to read first: then it makes none in this step."""
        followed = self._followed.get(key)
        count = 1 if followed is None else most
        return Draft((PROPOSED,) * count, "draft", _MATCH + (followed or 0))
