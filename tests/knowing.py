"""A source of right draft tokens instead of prompt lookup: it is told what follows which prompt."""

from collections.abc import Sequence as SeqOf

import pytest

from engine.planning.sequence import Sequence
from engine.planning.speculation import speculator
from engine.planning.speculation.drafter import Draft

Answers = dict[tuple[int, ...], list[int]]


class Knowing:
    """engine.planning.speculation.drafter.Drafter."""

    def __init__(self, answers: Answers) -> None:
        self._answers = answers

    def draft(self, seqs: SeqOf[Sequence], most: int) -> list[Draft | None]:
        return [self._draft(seq.tokens, most) for seq in seqs]

    def verified(self, seq: Sequence, proposed: int, right: int) -> None: ...
    def left(self, seq: Sequence) -> None: ...

    def _draft(self, tokens: SeqOf[int], most: int) -> Draft | None:
        for prompt, answer in self._answers.items():
            left = answer[len(tokens) - len(prompt) :][:most]
            if left and tuple(tokens[: len(prompt)]) == prompt:
                return Draft(tuple(left), "known", 16)
        return None


def know_answers(monkeypatch: pytest.MonkeyPatch) -> Answers:
    """Have instances of this process with `engine.speculate` ngram propose what the returned table, which may grow, says."""
    answers: Answers = {}
    monkeypatch.setattr(speculator, "PromptLookup", lambda: Knowing(answers))
    return answers
