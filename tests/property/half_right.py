"""A drafter of the fake rank's tokens that is wrong now and then."""

import random
from collections.abc import Sequence as SeqOf

from engine.planning.sequence import Sequence
from engine.planning.speculation.drafter import Draft
from tests.property.fake_rank import next_token


class HalfRight:
    """A drafter that knows what will be sampled, and says something else now and then."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng

    def draft(self, seqs: SeqOf[Sequence], most: int) -> list[Draft | None]:
        return [
            Draft(self.propose(list(seq.tokens), most), "", 1) if self.rng.random() < 0.8 else None
            for seq in seqs
        ]

    def propose(self, tokens: list[int], most: int) -> tuple[int, ...]:
        known = len(tokens)
        for _ in range(most):
            tokens.append(next_token(tokens) if self.rng.random() < 0.7 else self.rng.randrange(50))
        return tuple(tokens[known:])

    def verified(self, seq: Sequence, proposed: int, right: int) -> None: ...

    def left(self, seq: Sequence) -> None: ...
