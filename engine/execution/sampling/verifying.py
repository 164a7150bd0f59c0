"""Says which of a step's draft tokens were right.

The rows behind a sequence's draft tokens are sampled as though all draft tokens were right, each with its own position's number
and history. Invariant: what a row samples counts only where all draft tokens before it equal what was sampled, so the tokens are
those of one at a time."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import islice

import numpy as np

from core.plan import Sampled, SampledToken, SeqWork
from core.types import SamplingParams
from engine.execution.batch.batch import History, RankSeq


class LongerHistory:
    """A sequence as it will be with so many tokens: its draft tokens are right, or the host will hear of them. It holds until the
    sequence learns more."""

    __slots__ = ("last_place", "num_prompt", "num_tokens", "sampling", "tokens")

    def __init__(self, seq: RankSeq, num_tokens: int) -> None:
        self.tokens: np.ndarray = seq.tokens
        self.num_tokens = num_tokens
        self.last_place = seq.place_of(num_tokens - 1)
        self.num_prompt: int = seq.num_prompt
        self.sampling: SamplingParams = seq.sampling


def histories(work: SeqWork, seq: RankSeq) -> list[History]:
    """Return what each row of `work` is sampled behind."""
    first = work.known_end
    if not work.drafts and first == seq.num_tokens:
        return [seq]
    return [LongerHistory(seq, first + number) for number in range(work.num_samples)]


def verified(work: Sequence[SeqWork], rows: list[Sampled]) -> list[Sampled]:
    """Return for each of `work` what its rows have sampled up to the first wrong draft token."""
    if len(rows) == len(work):
        return rows  # nothing was proposed
    rest = iter(rows)
    return [_verified(item, list(islice(rest, item.num_samples))) for item in work]


def _verified(work: SeqWork, rows: Sequence[Sampled]) -> Sampled:
    right = 0
    while right < len(work.drafts) and rows[right].token == work.drafts[right]:
        right += 1
    more = tuple(SampledToken(row.token, row.logprob, row.top) for row in rows[1 : right + 1])
    return replace(rows[0], more=more, run=rows[right].run) if more else rows[0]
